"""Chat templates: the text that a model reads for a list of messages, rendered as transformers does."""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_jax.errors import ConfigError
from grpo_jax.language.folder import file_in, need
from grpo_jax.recording.files import fits

Messages = Sequence[Mapping[str, Any]]
"""A chat: messages with a `role`, such as "user", and a `content`."""


class ChatTemplate:
    """A sandboxed Jinja template, with the names and the filters that published templates use.

    Args:
      source: the template.
      special_tokens: texts by name, such as `{"bos_token": "<s>"}`.

    Raises:
      ConfigError: it is not Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        need("jinja2")
        from jinja2 import TemplateSyntaxError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_tag()]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            self._template, self._special_tokens = environment.from_string(source), dict(special_tokens)
        except Exception as error:  # Jinja's, or Python's for blocks that are nested too deeply
            line = f", line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
            raise ConfigError(f"the model's chat template is not Jinja{line}: {error}") from error

    def render(self, messages: Messages, *, add_generation_prompt: bool = True) -> str:
        """The text of a chat so far, by default with the tokens that begin an answer at its end.

        Raises:
          ConfigError: the template refuses the messages.
        """
        names = {"messages": list(messages), "tools": None, "documents": None} | self._special_tokens
        try:
            return self._template.render(names, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # Jinja's, or Python's, such as a TypeError for content that is not a text
            raise ConfigError(f"the model's chat template refuses {list(messages)!r}: {error}") from error


def load_chat_template(folder: Path, description: Mapping[str, Any]) -> ChatTemplate | None:
    """The template of a model folder, chat_template.jinja or a field of tokenizer_config.json; None without one.

    Args:
      folder: of the model.
      description: the contents of tokenizer_config.json.

    Raises:
      ConfigError: it cannot be read, or is not Jinja.
    """
    path = file_in(folder, "chat_template.jinja")
    try:
        source = path.read_text(encoding="utf-8") if path.exists() else description.get("chat_template")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if fits(source, list[dict[str, str]]):  # several by name
        source = {each.get("name"): each.get("template") for each in source}.get("default")
    if not fits(source, str | None):
        raise ConfigError(
            f"{folder / 'tokenizer_config.json'}: chat_template must be a text, or a list of texts by name"
        )
    return None if source is None else ChatTemplate(source, special_tokens(description))


def special_tokens(description: Mapping[str, Any]) -> dict[str, str]:
    """The texts of the special tokens in tokenizer_config.json, by names such as "eos_token"."""
    tokens = {name: value for name, value in description.items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """JSON without the HTML escapes of Jinja's filter, and without options that are called, such as `cls`."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _generation_tag() -> type:
    """The tag {% generation %} around the assistant's text, which does not change the rendered text."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(["name:endgeneration"], drop_needle=True), lineno=line)

    return Generation
