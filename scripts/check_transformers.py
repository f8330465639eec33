"""Compares the decoder with Hugging Face transformers on small random models of every family and option.

    python scripts/check_transformers.py FAMILY|all [--json]

Needs `pip install torch transformers` beside the packages of this repository (a build for CPU will do). Of each model
it compares logits, with and without padding, the mean loss, every gradient's norm and a greedy continuation; then it
exports the model, and compares the logits of what transformers loads, and of what is loaded here again. Exits with 1
where a difference is above its bound.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

# As a script, Python looks beside this file; the packages are one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")  # compiling is most of the time
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from models import Batch, Decoder, ModelConfig, forward, load_pretrained, save_pretrained  # noqa: E402
from models.pretrained import open_pretrained  # noqa: E402
from scripts.bench_table import Row, run  # noqa: E402

B, S, NEW = 2, 24, 16
LOGITS, LOSS, NORM = 100, 10, 100  # bounds, in units of a millionth; norms are relative
MILLIONTH = 1e-6

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.08,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
WINDOW = {"use_sliding_window": True, "sliding_window": 5}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 12, "sliding_window": 5}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}
QWEN_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}

# What each family is made with, besides `SMALL`.
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "Llama": {
        "plain": {},
        "tied, one head a key": {"tie_word_embeddings": True, "num_key_value_heads": 4, "rms_norm_eps": 1e-3},
        "biases, wide heads": {"attention_bias": True, "mlp_bias": True, "head_dim": 24},
        "gelu": {"hidden_act": "gelu"},
        "linear": {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5e3}},
        "llama3": {"rope_parameters": LLAMA3},
        "yarn": {"rope_parameters": YARN},
        "yarn, given numbers": {
            "rope_parameters": YARN | {"attention_factor": 1.3, "beta_fast": 8.0, "beta_slow": 0.5, "truncate": False}
        },
        "yarn, mscale": {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.4}},
    },
    "Mistral": {"window": {"sliding_window": 5}, "no window": {"sliding_window": None, "head_dim": 16}},
    "Qwen2": {
        "plain": {},
        "windows from a layer on": WINDOW | {"max_window_layers": 1},
        "listed windows": WINDOW | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    },
    "Qwen3": {
        "wide heads": {"head_dim": 16, "tie_word_embeddings": True},
        "biases, windows": WINDOW | {"head_dim": 8, "attention_bias": True, "max_window_layers": 2},
    },
    "Gemma2": {"windows": GEMMA, "biases, no caps": GEMMA | {"attention_bias": True, "attn_logit_softcapping": None}},
    "Gemma3Text": {
        "all but every sixth": GEMMA | {"num_hidden_layers": 7},
        "stretched": GEMMA
        | {
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
                "sliding_attention": LOCAL,
            },
            "final_logit_softcapping": 20.0,
        },
    },
    "SmolLM3": {
        "every fourth without rope": {},
        "listed": {"no_rope_layers": [0, 1, 1, 0], "tie_word_embeddings": False, "attention_bias": True},
        "windows where there is no rope": WINDOW | {"no_rope_layer_interval": 2, "mlp_bias": True},
    },
    "Olmo2": {"plain": {}, "biases": {"attention_bias": True, "tie_word_embeddings": True}},
    "Mixtral": {
        "plain": {"num_local_experts": 4},
        "window": {"num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 5},
    },
    "Qwen3Moe": {
        "normalised": QWEN_MOE | {"norm_topk_prob": True, "head_dim": 16},
        "dense layers": QWEN_MOE | {"norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
        "window": QWEN_MOE | WINDOW,
    },
    "DeepseekV3": {
        "groups": DEEPSEEK,
        "no query latent": DEEPSEEK | {"q_lora_rank": None, "n_shared_experts": 2},
        "one group, not normalised": DEEPSEEK | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False},
        "yarn": DEEPSEEK | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        "halves": DEEPSEEK | {"rope_interleave": False},
    },
}


def compare(family: str) -> Iterator[Row]:
    """The largest differences of each case."""
    for case, options in CASES[family].items():
        with tempfile.TemporaryDirectory() as folder:
            yield from _compare(family, case, options, Path(folder))


def _compare(family: str, case: str, options: dict[str, Any], folder: Path) -> Iterator[Row]:
    theirs = random_model(family, SMALL | options)
    theirs.save_pretrained(folder / "theirs")
    config, params = load_pretrained(folder / "theirs")
    tokens, mask = tokens_and_mask()
    what = f"{family}, {case}"
    logits = their_logits(theirs, tokens, mask)
    yield _row(f"{what}: logits", largest(logits, our_logits(config, params, tokens, mask), mask), LOGITS)
    loss, norms = their_loss(theirs, tokens)
    ours, our_norms = our_loss(config, params, tokens)
    yield _row("  mean loss", abs(loss - ours), LOSS)
    assert norms.keys() == our_norms.keys(), norms.keys() ^ our_norms.keys()
    yield _row("  gradient norms", max(abs(our_norms[name] - norm) / (norm or 1) for name, norm in norms.items()), NORM)
    yield Row("  greedy tokens that differ", differing(theirs, config, params, tokens), "", 0)
    facts = open_pretrained(folder / "theirs").facts
    save_pretrained(config, params, folder / "ours", facts=facts)
    yield _row("  export, logits", largest(logits, their_logits(load(folder / "ours"), tokens, mask), mask), LOGITS)
    back = load_pretrained(folder / "ours")
    same = back[0] == config and all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), params, back[1])))
    yield Row("  export, what another import changes", 0 if same else 1, "", 0)


def _row(what: str, value: float, bound: float) -> Row:
    return Row(what, value / MILLIONTH, "e-6", bound)


# --- transformers -------------------------------------------------------------------------------------------------


def random_model(family: str, options: dict[str, Any]) -> Any:
    """A model whose every parameter is random, norms and biases too, which would otherwise be ones and zeros."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("norm.weight", "bias")):
                tensor.add_(0.2 * torch.randn_like(tensor))
            elif name.endswith("mlp.gate.weight"):  # zeros, with which every expert would be as good
                tensor.copy_(0.3 * torch.randn_like(tensor))
    return model


def load(folder: Path) -> Any:
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[part] for part in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def their_logits(model: Any, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    import torch

    # Positions count tokens only, as here.
    positions = np.maximum(np.cumsum(mask, 1) - 1, 0)
    arguments = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
    with torch.no_grad():
        return model(**{name: torch.tensor(value) for name, value in arguments.items()}).logits.numpy()


def their_loss(model: Any, tokens: np.ndarray) -> tuple[float, dict[str, float]]:
    """The mean loss of next tokens, and the norm of each gradient by the tensor's name in a file."""
    import torch

    model.zero_grad()
    ids = torch.tensor(tokens)
    logits = model(input_ids=ids).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))
    loss.backward()
    for parameter in model.parameters():
        parameter.data, parameter.grad = parameter.grad.data, parameter.data
    found = saved_norms(model.save_pretrained)
    for parameter in model.parameters():
        parameter.data = parameter.grad.data
    return float(loss.detach()), found


def saved_norms(save: Callable[[Path], None]) -> dict[str, float]:
    """The norms of tensors by the names and in the forms that files have, which are the same for both."""
    from safetensors.numpy import load_file

    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder, "saved"))
        grads = load_file(Path(folder, "saved", "model.safetensors"))
    return {name: float(np.linalg.norm(grad)) for name, grad in grads.items() if not name.endswith("correction_bias")}


def differing(model: Any, config: ModelConfig, params: Any, tokens: np.ndarray) -> int:
    """Of `NEW` tokens after eight given ones, each the likeliest."""
    import torch

    ids = tokens[:1, :8]
    for _ in range(NEW):
        whole = np.pad(ids, ((0, 0), (0, 8 + NEW - ids.shape[1])))
        logits = np.asarray(forward(config, params, jnp.asarray(whole, jnp.int32)))[:, ids.shape[1] - 1]
        ids = np.concatenate([ids, logits.argmax(-1)[:, None]], 1)
    with torch.no_grad():
        theirs = torch.tensor(tokens[:1, :8])
        for _ in range(NEW):
            theirs = torch.cat([theirs, model(input_ids=theirs).logits[:, -1:].argmax(-1)], 1)
    return int((theirs.numpy() != ids).sum())


# --- Ours ---------------------------------------------------------------------------------------------------------


def tokens_and_mask() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    mask = np.ones((B, S), np.int64)
    mask[1, :5] = 0
    return random.integers(3, SMALL["vocab_size"], (B, S)), mask


def our_logits(config: ModelConfig, params: Any, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    return np.asarray(forward(config, params, jnp.asarray(tokens, jnp.int32), jnp.asarray(mask, jnp.int32)))


def our_loss(config: ModelConfig, params: Any, tokens: np.ndarray) -> tuple[float, dict[str, float]]:
    ids = jnp.asarray(tokens, jnp.int32)
    ones = jnp.ones((B, S - 1), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(S - 1, dtype=jnp.int32)[None], (B, S - 1))
    weights = jnp.full((B, S - 1), 1 / (B * (S - 1)), jnp.float32)
    batch = Batch(ids[:, :-1], ids[:, 1:], positions, ones, weights, jnp.arange(B, dtype=jnp.int32))
    loss, grads = jax.jit(jax.value_and_grad(Decoder(config).loss_sum))(params, batch)
    return float(loss), saved_norms(partial(save_pretrained, config, grads))


def largest(one: np.ndarray, other: np.ndarray, mask: np.ndarray) -> float:
    return float(np.abs(one - other)[mask == 1].max())


if __name__ == "__main__":
    sys.exit(run(__doc__ or "", {name: (partial(compare, name), f"{len(CASES[name])} cases") for name in CASES}))
