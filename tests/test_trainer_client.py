"""Hugging Face's Trainer, which finds AnyPrecisionAdamW by importing torchdistx.

Run by ``nox -s trainer``; elsewhere transformers is not installed. The Trainer runs in a process of
its own, offline, so that its warnings and settings stay there.
"""

from __future__ import annotations

import importlib.util
import json

import pytest

pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("transformers", "accelerate")),
    reason="transformers and accelerate are not installed: nox -s trainer has them",
)

SETUP = """
import json, os
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
import torch, torchdistx
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 4  # one batch, so that the losses of all steps are of the same sentences

    def __getitem__(self, index):
        words = (torch.arange(8) * (index + 1)) % 32
        return {"input_ids": words, "labels": words}

def make(optim, optim_args=None, dtype=torch.float32, **options):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=16,
    )
    model = LlamaForCausalLM(config).to(dtype)
    arguments = TrainingArguments(
        "checkpoints", optim=optim, optim_args=optim_args, max_steps=3, learning_rate=0.01,
        weight_decay=0.1, per_device_train_batch_size=4, report_to="none", use_cpu=True,
        logging_steps=1, **options,
    )
    return Trainer(model=model, args=arguments, train_dataset=Sentences())

def train(trainer, **options):
    trainer.train(**options)
    optimizer = trainer.optimizer
    while not isinstance(optimizer, torchdistx.optimizers.AnyPrecisionAdamW):
        if not hasattr(optimizer, "optimizer"):
            break
        optimizer = optimizer.optimizer
    weights = {name: w.detach().clone() for name, w in trainer.model.named_parameters()}
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return optimizer, weights, losses
"""


def test_trainer_equals_its_own_adamw(run_python):
    """All float32, as the Trainer itself asks for unless told otherwise: the same bits as AdamW."""
    run_python(
        SETUP
        + """
ours, our_weights, losses = train(make("adamw_anyprecision", save_strategy="no"))
assert type(ours) is torchdistx.optimizers.AnyPrecisionAdamW, type(ours)
theirs, their_weights, _ = train(make("adamw_torch", save_strategy="no"))
assert type(theirs) is torch.optim.AdamW, type(theirs)
assert len(losses) == 3
assert all(torch.equal(our_weights[name], their_weights[name]) for name in their_weights)
assert {int(state["step"]) for state in ours.state.values()} == {3}
"""
    )


def test_trainer_passes_dtypes_and_resumes(run_python):
    """bfloat16 weights with Kahan summation; a run resumed from its checkpoint ends the same."""
    done = run_python(
        SETUP
        + """
options = "use_kahan_summation=True,momentum_dtype=bfloat16,variance_dtype=float32"
arguments = dict(optim="adamw_anyprecision", optim_args=options, dtype=torch.bfloat16,
                 save_strategy="steps", save_steps=2, lr_scheduler_type="constant")
whole, weights, losses = train(make(**arguments))
state = next(iter(whole.state.values()))
resumed, again, _ = train(make(**arguments), resume_from_checkpoint="checkpoints/checkpoint-2")
assert all(torch.equal(weights[name], again[name]) for name in weights)
for one, other in zip(whole.state.values(), resumed.state.values()):
    assert all(torch.equal(one[key], other[key]) for key in one)
print("RESULT", json.dumps({
    "dtypes": {key: str(value.dtype) for key, value in state.items()},
    "kahan": bool(whole.param_groups[0]["use_kahan_summation"]),
    "weights": str(next(iter(weights.values())).dtype),
    "losses": losses,
}))
"""
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    result = json.loads(line[len("RESULT") :])
    assert result["dtypes"] == {
        "step": "torch.float32",
        "exp_avg": "torch.bfloat16",
        "exp_avg_sq": "torch.float32",
        "compensation": "torch.bfloat16",
    }
    assert result["kahan"] is True
    assert result["weights"] == "torch.bfloat16"
    assert result["losses"][-1] < result["losses"][0]
