"""Chat templates: the text that a model reads for a list of messages, rendered as transformers does."""

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_jax.errors import ConfigError
from grpo_jax.language.folder import as_config_error, file_in, need

Messages = Sequence[Mapping[str, Any]]
"""A chat: messages with a `role`, such as "user", and a `content`."""


class ChatTemplate:
    """A sandboxed Jinja template, with the names and the filters that published templates use.

    Args:
      source: the template.
      special_tokens: texts by name, such as `{"bos_token": "<s>"}`.
      variables: further values for the template, such as `{"enable_thinking": False}`.
      date: what `strftime_now` tells, in ISO's format; None: the time at which this value was made.

    Attributes:
      variables, date: the arguments.
      dates: the texts that `strftime_now` has told so far, by their formats.

    Raises:
      ConfigError: it is not Jinja, it reads no variable of a name, or the date is none.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        variables: Mapping[str, Any] | None = None,
        date: str | None = None,
    ):
        need("jinja2")
        from jinja2 import TemplateSyntaxError, meta
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: self.dates.setdefault(form, moment.strftime(form))
        with as_config_error(f"date={date!r} is no date in ISO's format, such as '2026-01-31': %s"):
            moment = datetime.datetime.fromisoformat(date) if date else datetime.datetime.now().replace(microsecond=0)
        self.variables = dict(variables or {})
        self.date, self.dates = moment.isoformat(), {}
        # The tag {% generation %} of transformers, around the assistant's text, changes nothing in what is rendered.
        source = re.sub(r"({%[-+]?\s*)(end)?generation(\s*[-+]?%})", r"\1\2with\3", source)
        try:
            self._template, self._special_tokens = environment.from_string(source), dict(special_tokens)
            read = meta.find_undeclared_variables(environment.parse(source)) - {"messages", "add_generation_prompt"}
        except Exception as error:  # Jinja's, or Python's for blocks that are nested too deeply
            line = f", line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
            raise ConfigError(f"the model's chat template is not Jinja{line}: {error}") from error
        if unread := sorted(self.variables.keys() - read):
            known = ", ".join(sorted(read - self._special_tokens.keys() - environment.globals.keys())) or "none"
            raise ConfigError(f"the model's chat template reads no variable {unread[0]!r}, only: {known}")

    def render(self, messages: Messages) -> str:
        """The text of a chat so far, with the tokens that begin an answer at its end.

        If the last message is the assistant's, the text ends with its content, which is to be continued
        (`continue_final_message` of transformers).

        Raises:
          ConfigError: it is no chat, or the template refuses it or leaves out a call of a tool.
        """
        *first, last = messages = as_messages(messages)
        if is_begun := last["role"] == "assistant":
            messages = [*first, last | {"content": last["content"] + _CUT}]
        names = {"messages": messages, "tools": None, "documents": None} | self._special_tokens | self.variables
        try:
            text = self._template.render(names, add_generation_prompt=not is_begun)
            calls = [call.get("function", call)["name"] for each in messages for call in each.get("tool_calls", ())]
        except Exception as error:  # Jinja's, or Python's, such as a TypeError for content that is not a text
            raise ConfigError(f"the model's chat template refuses {messages!r}: {error}") from error
        if lost := [name for name in calls if name not in text]:
            advice = "write it as content, in the form that the model knows, or use a model for tools"
            raise ConfigError(f"the model's chat template leaves out the call of the tool {lost[0]!r}; {advice}")
        if not is_begun:
            return text
        text, mark, after = text.rpartition(_CUT.strip())
        if not mark or last.get("tool_calls"):
            raise ConfigError(
                f"the last message, {last!r:.200}, cannot be continued: it calls tools, or the model's chat template "
                "leaves out its end; end the chat with a message of the user"
            )
        return text if after.startswith(" ") else text.rstrip()  # the template trims messages


_CUT = "END_OF_THE_TEXT_TO_CONTINUE "  # the space shows whether the template trims messages


def as_messages(chat: Any) -> list[dict[str, Any]]:
    """The messages of a chat, as templates take them: the parts of a text are joined; else a ConfigError."""
    messages = [_as_message(each) for each in chat] if isinstance(chat, list | tuple) else []
    if not messages or None in messages:
        wrong = f"{chat[messages.index(None)] if messages else chat!r:.200}"
        form = '[{"role": "user", "content": "2 + 3?"}], or with parts [{"type": "text", "text": "2 + 3?"}] as content'
        raise ConfigError(f"a prompt is a text, or a list of messages such as {form}, but this has {wrong}")
    if "content" not in messages[-1]:
        raise ConfigError(f"a chat ends with the calls of tools {chat[-1]!r:.200}; add what the tool or the user says")
    return messages


def _as_message(message: Any) -> dict[str, Any] | None:
    """A message without what is None, as in transformers, such as no text beside calls of tools; None for others."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return None
    message = {name: value for name, value in message.items() if value is not None}
    content = message.get("content")
    if isinstance(content, list | tuple) and content and all(map(_is_text, content)):
        message["content"] = "".join(part["text"] for part in content)
    has_calls = content is None and message.get("tool_calls")
    return message if has_calls or isinstance(message.get("content"), str) else None


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def load_chat_template(folder: Path, description: Mapping[str, Any], **options: Any) -> ChatTemplate | None:
    """The template in chat_template.jinja of a folder or in its tokenizer_config.json, the description; or None."""
    path = file_in(folder, "chat_template.jinja")
    with as_config_error(f"{path} cannot be read: %s"):
        source = path.read_text(encoding="utf-8") if path.exists() else description.get("chat_template")
    if isinstance(source, list):  # several by name
        source = {each.get("name"): each.get("template") for each in source}.get("default")
    if source is None and (variables := options.get("variables")):
        raise ConfigError(f"{folder} has no chat template for the variables {', '.join(variables)}; leave them out")
    return None if source is None else ChatTemplate(source, special_tokens(description), **options)


def special_tokens(description: Mapping[str, Any]) -> dict[str, str]:
    """The texts of the special tokens in tokenizer_config.json, by names such as "eos_token"."""
    found = {name: value.get("content") if isinstance(value, dict) else value for name, value in description.items()}
    return {name: text for name, text in found.items() if name.endswith("_token") and isinstance(text, str)}


def _to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """JSON without the HTML escapes of Jinja's filter, and without options that are called, such as `cls`."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
