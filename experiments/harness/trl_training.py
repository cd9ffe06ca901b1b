"""The training of `experiments.beside_trl` by TRL, in a Python without grpo_jax; the reward of both sides."""

import json
import os
import resource
import sys
import time

from experiments.harness.pretrained_tasks import exact, sentiment


def counted(completions, answer, **fields):
    """The reward. What the process has used so far is a line of the file $COSTS."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    line = {"time": time.time(), "cpu": used.ru_utime + used.ru_stime, "peak": used.ru_maxrss / 2**20}
    with open(os.environ["COSTS"], "a") as file:
        file.write(json.dumps(line) + "\n")
    return exact(completions, answer)


def main(model, folder, limit, seed, iterations):
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    fixed = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "per_device_train_batch_size": 8}
    fixed |= {"gradient_accumulation_steps": 4, "lr_scheduler_type": "constant", "save_strategy": "no"}
    numbers = {"learning_rate": 5e-4, "max_steps": int(iterations), "max_completion_length": int(limit)}
    data = Dataset.from_list(sentiment().prompts).rename_column("messages", "prompt")
    config = GRPOConfig(folder, report_to="none", logging_steps=1, seed=int(seed), **fixed, **numbers)
    lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear")
    trainer = GRPOTrainer(model, reward_funcs=counted, args=config, train_dataset=data, peft_config=lora)
    trainer.train()
    trainer.save_model(f"{folder}/adapter")


if __name__ == "__main__":
    main(*sys.argv[1:])
