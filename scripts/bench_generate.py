"""Tokens per second of generation, beside Tunix's vanilla sampler where it is installed.

    python scripts/bench_generate.py [--weights PATH] [--batch 16] [--tokens 128] [--temperature 1] [--rounds 3]
                                     [--dtype float32]

Both run in this process with the same weights, prompts (8 to 31 tokens), and dtype; SmolLM2-135M's architecture, with
random weights or those of a file that `models.load_pretrained` reads. The first call of each is timed apart: it
compiles. Then they take turns, and each round's order is the other way round; printed are the medians. Tunix has its
own noise and ignores `rope_theta` (both use its 1e6 here), so only greedy tokens can be equal.

Tunix (`pip install google-tunix==0.1.7`, Python 3.12) brings its own JAX: install it into an environment of its own and
run this script there, with this repository on PYTHONPATH. Without it the script measures meshsys alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from models import Decoder, ModelConfig
from models.generation import Generator, Request

SMOLLM2 = ModelConfig(
    layers=30,
    d_model=576,
    heads=9,
    kv_heads=3,
    d_ff=1536,
    vocab_size=49152,
    tie_embeddings=True,
    rope_theta=1e6,
)
LONGEST_PROMPT = 32

Sampler = Callable[[list[np.ndarray]], list[np.ndarray]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--weights", metavar="PATH", help="a model of SmolLM2's architecture; random ones without it")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each sequence")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and products")
    args = parser.parse_args()

    config, params = load(args.weights)
    config = dataclasses.replace(config, dtype=args.dtype)
    params = jax.tree.map(lambda leaf: leaf.astype(args.dtype), params)
    random = np.random.default_rng(0)
    prompts = [random.integers(3, config.vocab_size - 3, n) for n in random.integers(8, LONGEST_PROMPT, args.batch)]
    samplers = {"meshsys": ours(config, params, args), "tunix": tunix(config, params, args)}
    samplers = {name: sampler for name, sampler in samplers.items() if sampler}
    if len(samplers) == 1:
        print("tunix is not installed here: meshsys alone")

    found = {}
    for name, sampler in samplers.items():
        seconds, found[name] = timed(sampler, prompts)
        print(f"{name}: first call {seconds:.1f} s")
    if args.temperature == 0 and len(found) == 2:
        equal = [np.mean(a == b) for a, b in zip(found["meshsys"], found["tunix"], strict=True)]
        print(f"greedy tokens that are equal: {np.mean(equal):.1%}")
    times: dict[str, list[float]] = {name: [] for name in samplers}
    cpu: dict[str, list[float]] = {name: [] for name in samplers}
    for turn in range(args.rounds):
        for name in list(samplers)[:: -1 if turn % 2 else 1]:
            before = time.process_time()
            seconds, _ = timed(samplers[name], prompts)
            times[name].append(seconds)
            cpu[name].append(time.process_time() - before)
    count = args.batch * args.tokens
    for name, seconds in times.items():
        median = statistics.median(seconds)
        print(
            f"{name}: {count / median:.0f} tokens/s, {median / args.tokens * 1e3:.1f} ms a step "
            f"(rounds {', '.join(f'{s:.2f}' for s in seconds)} s; {statistics.median(cpu[name]):.2f} s of CPU)"
        )
    if len(times) == 2:
        ratios = [b / a for a, b in zip(times["meshsys"], times["tunix"], strict=True)]
        work = statistics.median(cpu["tunix"]) / statistics.median(cpu["meshsys"])
        print(f"meshsys / tunix: {statistics.median(ratios):.2f} in tokens/s, {work:.2f} in CPU time")


def load(path: str | None) -> tuple[ModelConfig, Any]:
    if path:
        from models import load_pretrained

        config, params = load_pretrained(path)
        return dataclasses.replace(config, rope_theta=SMOLLM2.rope_theta), params
    return SMOLLM2, jax.jit(Decoder(SMOLLM2).init)(jax.random.key(0))


def timed(sampler: Sampler, prompts: list[np.ndarray]) -> tuple[float, list[np.ndarray]]:
    start = time.perf_counter()
    tokens = sampler(prompts)
    return time.perf_counter() - start, tokens


def ours(config: ModelConfig, params: Any, args: argparse.Namespace) -> Sampler:
    generator = Generator(Decoder(config), params, slots=args.batch)
    calls = []

    def run(prompts: list[np.ndarray]) -> list[np.ndarray]:
        before = generator.compilations
        requests = [Request(prompt=p, max_tokens=args.tokens, temperature=args.temperature) for p in prompts]
        tokens = [completion.tokens for completion in generator.generate(requests)]
        calls.append(generator.compilations - before)
        assert not any(calls[1:]), f"compilations in each call: {calls}"
        return tokens

    return run


def tunix(config: ModelConfig, params: Any, args: argparse.Namespace) -> Sampler | None:
    try:
        from flax import nnx
        from tunix.generate.sampler import CacheConfig
        from tunix.generate.sampler import Sampler as Vanilla
        from tunix.models.llama3 import model as llama
    except ImportError:
        return None

    model = llama.Llama3(
        llama.ModelConfig(
            num_layers=config.layers,
            vocab_size=config.vocab_size,
            embed_dim=config.d_model,
            hidden_dim=config.d_ff,
            num_heads=config.heads,
            head_dim=config.size_of_head,
            num_kv_heads=config.num_kv_heads,
            rope_theta=int(config.rope_theta),
            norm_eps=config.norm_epsilon,
            weight_tying=config.tie_embeddings,
        ),
        rngs=nnx.Rngs(0),
    )
    layers = params["layers"]
    model.embedder.input_embedding.value = params["shared"]["embed"]["embedding"]
    model.final_norm.w.value = params["shared"]["head"]["norm"]["scale"]
    for number, layer in enumerate(model.layers):
        layer.input_layernorm.w.value = layers["attention_norm"]["scale"][number]
        layer.post_attention_layernorm.w.value = layers["mlp_norm"]["scale"][number]
        for name, module in (("query", layer.attn.q_proj), ("key", layer.attn.k_proj), ("value", layer.attn.v_proj)):
            module.w.value = layers["attention"][name][number]
        layer.attn.o_proj.w.value = layers["attention"]["out"][number]
        for name, module in (("gate", layer.mlp.gate_proj), ("up", layer.mlp.up_proj), ("down", layer.mlp.down_proj)):
            module.kernel.value = layers["mlp"][name][number]

    class Ids:
        """A tokenizer of prompts that are written as numbers; its special tokens are never drawn, or hardly."""

        def pad_id(self) -> int:
            return config.vocab_size - 1

        def bos_id(self) -> int:
            return 1

        def eos_id(self) -> int:
            return config.vocab_size - 2

        def encode(self, text: str, **_: Any) -> list[int]:
            return [int(word) for word in text.split()]

        def decode(self, ids: list[int], **_: Any) -> str:
            return " ".join(map(str, ids))

    cache = CacheConfig(LONGEST_PROMPT + args.tokens, config.layers, config.num_kv_heads, config.size_of_head)
    sampler = Vanilla(model, Ids(), cache)
    mode = {"temperature": args.temperature, "top_p": 1.0} if args.temperature else {}
    calls = iter(range(1 << 30))

    def run(prompts: list[np.ndarray]) -> list[np.ndarray]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            texts = [" ".join(map(str, prompt)) for prompt in prompts]
            made = sampler(texts, args.tokens, LONGEST_PROMPT, seed=next(calls), **mode)
        return [np.asarray(tokens) for tokens in made.tokens]

    return run


if __name__ == "__main__":
    main()
