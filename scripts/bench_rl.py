"""Seconds of a GRPO step and steps to a reward, beside Tunix's where it is installed.

    python scripts/bench_rl.py [--steps 60] [--block 10]

Both train the same Llama of 2 layers from the same weights in this process, on 8 fake devices, fsdp 4 x tensor 2: 8
prompts of 16 tokens (the one that begins a text among them), 4 responses of 16 tokens to each, float32, temperature 1,
no penalty for leaving the reference, one update a step, Adam at a constant 3e-3. The reward is the share of tokens
that are among 16 of the 264. Tunix gets a new seed in every step, without which its noise would stay the same.
Blocks of steps take turns, A B A B; a step's time is from one reward to the next without the reward, and the first
block of each, which compiles, is left out. Tunix samples in the layout that it trains in; meshsys samples over 8
data-parallel devices and reshards in between, and trains the responses to a prompt in one row.

Tunix (`pip install google-tunix==0.1.7`, Python 3.12) brings its own JAX: install it into an environment of its own and
run this script there, with this repository on PYTHONPATH. Without it the script measures meshsys alone.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import numpy as np  # noqa: E402

from meshsys.assemble import assemble  # noqa: E402
from meshsys.config import Config  # noqa: E402
from meshsys.mesh import make_mesh  # noqa: E402
from meshsys.rl.collect import Collector  # noqa: E402
from meshsys.rl.learn import Learner  # noqa: E402
from meshsys.rl.prompt import Prompt  # noqa: E402
from meshsys.rl.prompts import Asked  # noqa: E402
from meshsys.rl.rewards import Scores  # noqa: E402
from meshsys.rl.rollouts import length_of_a_row  # noqa: E402
from meshsys.rl.sampler import OnSameDevices, Sampler  # noqa: E402
from meshsys.rl.update import PolicyUpdate  # noqa: E402
from meshsys.torus import place  # noqa: E402
from models.sampling import Sampling  # noqa: E402

PROMPTS, SAMPLES, PROMPT, RESPONSE, VOCAB, EOS, GOOD = 8, 4, 16, 16, 264, 2, 16
LAYERS, D_MODEL, D_FF, HEADS, KV_HEADS, RATE = 2, 64, 128, 4, 2, 3e-3
LEARNED = 0.95


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--block", type=int, default=10, help="steps of one before it is the other's turn")
    args = parser.parse_args()

    ours = Ours()
    if tunix_is_there():
        theirs = run_tunix(ours.params, args.steps, args.block, lambda: ours.run(args.block))
        show("tunix", *theirs, args.block)
    else:
        print("tunix is not installed here: meshsys alone")
        for _ in range(0, args.steps, args.block):
            ours.run(args.block)
        theirs = None
    show("meshsys", ours.seconds, ours.rewards, args.block)
    if theirs:
        pair = [statistics.median(seconds[args.block :]) for seconds in (ours.seconds, theirs[0])]
        print(f"meshsys / tunix: {pair[0] / pair[1]:.2f} in seconds of a step")


def show(name: str, seconds: list[float], rewards: list[float], block: int) -> None:
    reached = next((step for step, reward in enumerate(rewards, 1) if reward >= LEARNED), None)
    print(
        f"{name}: {statistics.median(seconds[block:]) * 1e3:.0f} ms a step (median of {len(seconds) - block}), reward "
        f"{rewards[0]:.3f} at first, {LEARNED} after {reached or 'more'} steps, {rewards[-1]:.3f} at the end"
    )


def prompts_of(step: int) -> list[np.ndarray]:
    """Of one step: random tokens; Tunix puts one before them."""
    return list(np.random.default_rng(step).integers(3, VOCAB, (PROMPTS, PROMPT - 1), np.int32))


# --- meshsys ------------------------------------------------------------------------------------------------------


class Ours:
    """The loop's own parts, with rewards in this process as Tunix has them."""

    def __init__(self) -> None:
        config = Config.model_validate(
            {
                "run": {"name": "bench"},
                "model": {
                    "layers": LAYERS,
                    "d_model": D_MODEL,
                    "heads": HEADS,
                    "kv_heads": KV_HEADS,
                    "d_ff": D_FF,
                    "vocab_size": VOCAB,
                },
                "data": {"batch_size": PROMPTS, "sequence_length": length_of_a_row(PROMPT, RESPONSE, SAMPLES)},
                "mesh": {"topology": "4x2", "axes": {"fsdp": 4, "tensor": 2}},
                "pipeline": {"split_backward": False},  # one rank waits for no other
                "train": {
                    "learning_rate": RATE,
                    "final_learning_rate_fraction": 1.0,
                    "weight_decay": 0.0,
                    "gradient_clip": 0.0,
                },
                "rl": {
                    "tasks": [{"source": "rack"}],
                    "algorithm": {"kl": {"coefficient": 0.0}},
                    "prompts_per_step": PROMPTS,
                    "samples_per_prompt": SAMPLES,
                    "responses_per_row": SAMPLES,
                    "max_prompt_tokens": PROMPT,
                    "max_response_tokens": RESPONSE,
                },
            }
        )
        assert config.rl is not None
        assembly = assemble(config)
        recipe = config.rl.algorithm.recipe(RESPONSE, max_sequences=SAMPLES, exact=True)
        self.update = PolicyUpdate(assembly, make_mesh(assembly.placement), recipe.policy_loss, Sampling())
        self.state = self.update.init()
        self.params = jax.device_get(self.update.to_canonical(self.state).params)
        mesh = make_mesh(place(assembly.placement.topology, {"data": 8}))
        carrier = OnSameDevices(assembly, self.state.params, mesh, "copy")
        self.sampler = Sampler(assembly, mesh, carrier, slots=PROMPTS * SAMPLES)
        tokenizer: Any = SimpleNamespace(stop_ids=frozenset({EOS}), decode=lambda ids: ids)
        pool: Any = SimpleNamespace(submit=lambda samples: samples, collect=scores)
        self.collector = Collector(config.rl, self.sampler, pool, tokenizer, refills=False, seed=0)
        self.learner = Learner(config.rl, recipe, self.update, PROMPTS)
        self.seconds: list[float] = []
        self.rewards: list[float] = []

    def run(self, steps: int) -> None:
        for _ in range(steps):
            begun, step = time.perf_counter(), len(self.seconds)
            self.sampler.update(self.state.params, step)
            asked = [Asked(PROMPTS * step + row, Prompt(str(row), ""), ids) for row, ids in enumerate(prompts_of(step))]
            prompts: Any = SimpleNamespace(take=lambda _, asked=asked: asked)
            found = self.collector.collect(prompts, step)
            order = np.random.default_rng(step)
            self.state, _, _ = self.learner.learn(self.state, found.rollouts, found.score_N, order)
            self.seconds.append(time.perf_counter() - begun)
            self.rewards.append(float(found.score_N.mean()))


def scores(samples: list[tuple[Prompt, Any]]) -> Scores:
    return Scores(np.array([share(ids) for _, ids in samples]), {}, (), 0.0)


def share(ids: np.ndarray) -> float:
    return float(np.mean((ids > EOS) & (ids <= EOS + GOOD))) if len(ids) else 0.0


# --- Tunix --------------------------------------------------------------------------------------------------------


def tunix_is_there() -> bool:
    try:
        import tunix  # noqa: F401
    except ImportError:
        return False
    return True


def run_tunix(params: Any, steps: int, block: int, other: Callable[[], None]) -> tuple[list[float], list[float]]:
    """Seconds and rewards of each step; `other` runs after every block."""
    import optax
    from flax import nnx
    from jax.sharding import Mesh
    from tunix.models.llama3 import model as llama
    from tunix.rl import rl_cluster as rlc
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
    from tunix.rl.rollout import base_rollout

    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tp"))
    config = llama.ModelConfig(
        num_layers=LAYERS,
        vocab_size=VOCAB,
        embed_dim=D_MODEL,
        hidden_dim=D_FF,
        num_heads=HEADS,
        head_dim=D_MODEL // HEADS,
        num_kv_heads=KV_HEADS,
        rope_theta=10000,
        norm_eps=1e-5,
    )

    @nnx.jit
    def model() -> Any:
        made = llama.Llama3(config, rngs=nnx.Rngs(0))
        layers, shared = params["layers"], params["shared"]
        made.embedder.input_embedding.value = jax.numpy.asarray(shared["embed"]["embedding"])
        made.final_norm.w.value = jax.numpy.asarray(shared["head"]["norm"]["scale"])
        made.lm_head.w.value = jax.numpy.asarray(shared["head"]["kernel"])
        for number, layer in enumerate(made.layers):
            for name, module in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"), ("out", "o_proj")):
                getattr(layer.attn, module).w.value = jax.numpy.asarray(layers["attention"][name][number])
            for name in ("gate", "up", "down"):
                getattr(layer.mlp, f"{name}_proj").kernel.value = jax.numpy.asarray(layers["mlp"][name][number])
        state = nnx.state(made)
        nnx.update(made, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
        return made

    class Ids:
        """A tokenizer of prompts that are written as numbers."""

        def pad_id(self) -> int:
            return 0

        def bos_id(self) -> int:
            return 1

        def eos_id(self) -> int:
            return EOS

        def encode(self, text: str, **_: Any) -> list[int]:
            return [int(word) for word in text.split()]

        def decode(self, ids: Any, **_: Any) -> str:
            return " ".join(map(str, ids))

    with mesh:
        actor = model()
    seconds: list[float] = []
    rewards: list[float] = []
    last = [time.perf_counter()]

    def reward(prompts: Any, completions: list[str], **_: Any) -> list[float]:
        seconds.append(time.perf_counter() - last[0])
        found = [share(np.array([int(word) for word in text.split()])) for text in completions]
        rewards.append(float(np.mean(found)))
        if len(rewards) % block == 0:
            other()
        cluster.cluster_config.rollout_config.seed = len(rewards)
        last[0] = time.perf_counter()
        return found

    with tempfile.TemporaryDirectory() as folder:
        cluster = rlc.RLCluster(
            actor=actor,
            reference=actor,
            tokenizer=Ids(),
            cluster_config=rlc.ClusterConfig(
                role_to_mesh={role: mesh for role in (rlc.Role.ACTOR, rlc.Role.REFERENCE, rlc.Role.ROLLOUT)},
                rollout_engine="vanilla",
                offload_to_cpu=False,
                training_config=rlc.RLTrainingConfig(
                    actor_optimizer=optax.adam(RATE),
                    eval_every_n_steps=10**6,
                    max_steps=steps,
                    checkpoint_root_directory=folder,
                    data_sharding_axis=("fsdp",),
                ),
                rollout_config=base_rollout.RolloutConfig(
                    max_tokens_to_generate=RESPONSE,
                    max_prompt_length=PROMPT,
                    kv_cache_size=PROMPT + RESPONSE + 8,
                    temperature=1.0,
                    top_p=1.0,
                    top_k=None,
                ),
            ),
        )
        learner = GRPOLearner(
            rl_cluster=cluster,
            reward_fns=reward,
            algo_config=GRPOConfig(num_generations=SAMPLES, num_iterations=1, beta=0.0, epsilon=0.2),
        )

        def batches() -> Iterator[dict[str, np.ndarray]]:
            for step in range(steps):
                texts = [" ".join(map(str, ids)) for ids in prompts_of(step)]
                yield {"prompts": np.array(texts), "answer": np.array([""] * PROMPTS)}

        learner.train(batches())
    return seconds, rewards


if __name__ == "__main__":
    main()
