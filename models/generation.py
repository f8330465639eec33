"""Generation: many sequences at once, by few compiled programs.

Shapes are rounded up to a few sizes, so that a second call with similar requests compiles nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import jax
import numpy as np

from models.decoder import Decoder
from models.decoding import DecodingForm
from models.kv_cache import CACHE_AXES
from models.products import weights_first
from models.requests import Completion, Piece, Request, numbered
from models.slots import Arrival, Chunk, Slots, admit, arrival, compact, decode, empty_slots

__all__ = ["Completion", "Generation", "Generator", "Piece", "Request"]

PyTree = Any
Place = Callable[[tuple[str | None, ...], tuple[int, ...]], jax.sharding.Sharding]
"""The sharding of an array by its logical axes and shape."""

_PROMPTS = 4  # run at once: that keeps matmuls busy, and little is wasted where one slot is free
_BYTES_TOGETHER = 32 << 20  # of layers that one program brings into the generator's form
_LEAST_PROMPT, _LEAST_PLACES, _STOPS = 16, 32, 8  # sizes are multiples of these
_LEAST_SLOTS = 4  # of a table that was compacted: a smaller one would be little faster


class Generator:
    """Generates with one model.

    Args:
        decoder: the model.
        params: in canonical form, on a device or sharded over a mesh; they are copied into a form of the generator's.
        slots: sequences that are generated at once, at most.
        chunk: steps on the device between two looks at what they made, at most.
        compacts: the last sequences, when nothing waits for the slots of those that ended, go on in a table of half the
            slots or fewer. A step then takes less, but each size needs programs of its own: for many calls.
        place: for parameters on a mesh, the shardings of what goes with them; None leaves all on the default device.
        compiler_options: XLA's, for `jax.jit`.
    """

    def __init__(
        self,
        decoder: Decoder,
        params: PyTree,
        *,
        slots: int = 16,
        chunk: int = 32,
        compacts: bool = False,
        place: Place | None = None,
        compiler_options: dict[str, Any] | None = None,
    ):
        if slots < 1 or chunk < 1:
            raise ValueError(f"slots={slots} and chunk={chunk} must be at least 1; raise them")
        self.decoder, self.slots, self.chunk, self.compacts, self._place = decoder, slots, chunk, compacts, place
        self._compiler_options = compiler_options
        self._weights_first = jax.default_backend() == "cpu"
        self._form = DecodingForm(decoder, self._weights_first)
        self._programs: dict[tuple[Any, ...], Any] = {}
        self._params: PyTree = None
        self.update(params)

    @property
    def compilations(self) -> int:
        """Programs that were compiled so far."""
        return len(self._programs)

    def update(self, params: PyTree) -> None:
        """Takes other parameters, of the same shapes and shardings.

        A generation that goes on between two chunks continues with them, on the keys and values of the old ones.
        """
        self._params = None  # the old ones may go before the new ones come
        layers: list[PyTree] = []
        for numbers in self._together(params["layers"]):
            holders = self.decoder.holders.items()
            own = [{name: at.index(number) for name, at in holders if number in at} for number in numbers]
            stacks = {name: params["layers"][name] for name in own[0]}
            at = [{name: np.int32(index) for name, index in one.items()} for one in own]
            layers += self._run("layers", self._form.layers, stacks, at)
        self._params = {"shared": self._run("shared", self._form.shared, params["shared"]), "layers": tuple(layers)}

    def _together(self, layers: PyTree) -> Iterator[list[int]]:
        """Numbers of successive layers that have the same parts and, together, few bytes."""
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(layers)) // self.decoder.config.layers
        most = max(1, _BYTES_TOGETHER // max(size, 1))
        for run in self.decoder.runs:
            for first in range(run.first, run.first + run.count, most):
                yield list(range(first, min(first + most, run.first + run.count)))

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """All requests' completions, in their order.

        Raises:
            ValueError: a token of a prompt is not in the vocabulary.
        """
        pieces: list[list[Piece]] = [[] for _ in requests]
        for piece in self.start(requests):
            pieces[piece.request].append(piece)
        return [
            Completion(np.concatenate([p.tokens for p in own]), np.concatenate([p.log_probs for p in own]), own[-1][3])
            for own in pieces
        ]

    def start(
        self, requests: Sequence[Request], *, every: int | None = None, room: tuple[int, int] = (0, 0)
    ) -> Generation:
        """Begins to generate; the result is an iterator.

        Args:
            every: the most tokens of a piece; None means the generator's chunk.
            room: for requests that are added later: the longest prompt, and the most new tokens.

        Raises:
            ValueError: a token of a prompt is not in the vocabulary.
        """
        return Generation(self, requests, min(every or self.chunk, self.chunk), room)

    # --- Programs -----------------------------------------------------------------------------------------------

    def empty(self, slots: int, places: int, stops: int) -> Slots:
        """See `models.slots.empty_slots`."""
        sizes = slots, places, stops
        return self._run(("empty", *sizes), lambda: empty_slots(self.decoder, *sizes), placed=True)

    def admit(self, slots: Slots, new: Arrival) -> Slots:
        """See `models.slots.admit`; takes the slots over."""
        if self._place:  # prompts are divided as the slots are, lest every device runs all of them
            tokens_RP, count_R = (
                jax.device_put(field, self._place(("batch", *[None] * (field.ndim - 1)), field.shape))
                for field in (new.tokens_RP, new.count_R)
            )
            new = new._replace(tokens_RP=tokens_RP, count_R=count_R)
        return self._run("admit", partial(admit, self._form), self._params, slots, new, donated=(1,), placed=True)

    def prompts_at_once(self, slots: int) -> int:
        """How many prompts run together: a few, and one for each part of the slots."""
        return min(max(_PROMPTS, self.parts(slots)), slots)

    def parts(self, slots: int) -> int:
        """Among how many devices so many slots are divided."""
        return slots // self._place(("batch",), (slots,)).shard_shape((slots,))[0] if self._place else 1

    def compact(self, slots: Slots, slot_b: np.ndarray) -> Slots:
        """See `models.slots.compact`."""
        return self._run("compact", compact, slots, slot_b, placed=True)

    def decode(self, slots: Slots, steps: int, cancelled_B: np.ndarray) -> tuple[Slots, Chunk]:
        """See `models.slots.decode`; takes the slots over."""

        program, args = partial(decode, self._form, chunk=self.chunk), (slots, np.int32(steps), cancelled_B)
        return self._run("decode", program, self._params, *args, donated=(1,), placed=True)

    def _run(
        self, name: Any, program: Callable[..., Any], *args: Any, donated: tuple[int, ...] = (), placed: bool = False
    ) -> Any:
        """Runs a program, which is compiled once for its name and the shapes of its arguments.

        Args:
            placed: the results have the shardings of `place`.
        """
        leaves, tree = jax.tree.flatten(args)
        key = (name, tree, *((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self._programs:
            with weights_first(self._weights_first):
                out = self._shardings(jax.eval_shape(program, *args)) if placed and self._place else None
                jitted = jax.jit(program, donate_argnums=donated, out_shardings=out)
                self._programs[key] = jitted.lower(*args).compile(self._compiler_options)
        return self._programs[key](*args)

    def _shardings(self, tree: PyTree) -> PyTree:
        """Of slots and chunks: only keys and values, the arrays of rank 4, are divided."""
        place = self._place
        assert place is not None
        return jax.tree.map(
            lambda leaf: place(CACHE_AXES if leaf.ndim == len(CACHE_AXES) else (None,) * leaf.ndim, leaf.shape), tree
        )


class Generation:
    """Sequences that are being generated: an iterator of their pieces.

    A sequence that has ended makes room for the next request.
    """

    def __init__(self, generator: Generator, requests: Sequence[Request], every: int, room: tuple[int, int]):
        self._generator, self._every = generator, every
        self._compacts = generator.compacts and not any(room)
        self._requests = dict(enumerate(numbered(requests, generator.decoder.config.vocab_size)))
        self._waiting, self._added = deque(self._requests), len(requests)
        slots = min(generator.slots, _power_of_two(len(requests)))
        self._holder: list[int | None] = [None] * slots
        self._cancelled = np.zeros((slots,), bool)
        longest = max((len(r.prompt) + r.max_tokens for r in requests), default=1)
        prompts = [len(request.prompt) for request in requests]
        self._places = max(_rounded(max(longest, sum(room)), _LEAST_PLACES), *map(_padded, (*prompts, room[0])))
        self._stops = _rounded(max((len(r.stop_ids) for r in requests), default=1) or 1, _STOPS)
        self._slots = generator.empty(slots, self._places, self._stops)
        self._pieces = self._run()

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    def add(self, requests: Sequence[Request]) -> list[int]:
        """Requests that wait behind the others; returns their numbers.

        Raises:
            ValueError: a token of a prompt is not in the vocabulary, or there is no room for a sequence.
        """
        for request in requests:
            tokens = len(request.prompt), request.max_tokens
            if max(sum(tokens), _padded(tokens[0])) > self._places or len(request.stop_ids) > self._stops:
                raise ValueError(f"a prompt of {tokens[0]} tokens and {tokens[1]} new ones need more room; give it")
        numbers = list(range(self._added, self._added + len(requests)))
        new = numbered(requests, self._generator.decoder.config.vocab_size)
        self._requests.update(zip(numbers, new, strict=True))
        self._waiting.extend(numbers)
        self._added += len(requests)
        return numbers

    def advance(self) -> list[Piece]:
        """The pieces of the next chunk, all of the parameters that the generator has now; none if nothing is left."""
        return list(self._chunk())

    def cancel(self, request: int) -> None:
        """Ends a request's sequence; no piece of it follows."""
        if request in self._waiting:
            self._waiting.remove(request)
            del self._requests[request]
        elif request in self._holder:
            del self._requests[request]
            slot = self._holder.index(request)
            self._holder[slot], self._cancelled[slot] = None, True

    def _run(self) -> Iterator[Piece]:
        while self._waiting or any(request is not None for request in self._holder):
            yield from self._chunk()

    def _chunk(self) -> Iterator[Piece]:
        self._slots = self._filled(self._slots)
        if all(request is None for request in self._holder):
            return
        if self._compacts and not self._waiting:
            self._slots = self._compacted(self._slots)
        self._slots, chunk = self._generator.decode(self._slots, self._every, self._cancelled)
        self._cancelled = np.zeros_like(self._cancelled)
        yield from self._new(jax.device_get(chunk))

    def _new(self, chunk: Chunk) -> Iterator[Piece]:
        for slot, request in enumerate(self._holder):
            if request is None:
                continue
            count = chunk.count_B[slot]
            tokens, log_probs = chunk.tokens_BC[slot, :count], chunk.log_probs_BC[slot, :count]
            reason: Literal["", "stop", "length"] = ""
            if not chunk.remaining_B[slot]:
                reason = "stop" if tokens[-1] in self._requests.pop(request).stop_ids else "length"
                self._holder[slot] = None
            yield Piece(request, tokens, log_probs, reason)

    def _filled(self, slots: Slots) -> Slots:
        """Puts waiting requests into free slots: a few prompts of about one length at once, equal ones only once."""
        new: dict[int, Request] = {}
        for slot, request in enumerate(self._holder):
            if request is None and self._waiting:
                self._holder[slot] = first = self._waiting.popleft()
                self._cancelled[slot] = False
                new[slot] = self._requests[first]
        at_once = self._generator.prompts_at_once(len(self._holder))
        for padded in sorted({_padded(len(request.prompt)) for request in new.values()}):
            equal: dict[bytes, list[int]] = {}
            for slot, one in new.items():
                if _padded(len(one.prompt)) == padded:
                    equal.setdefault(one.ids.tobytes(), []).append(slot)
            prompts = list(equal.values())
            for start in range(0, len(prompts), at_once):
                sizes = {"slots": len(self._holder), "at_once": at_once, "padded": padded, "stops": self._stops}
                slots = self._generator.admit(slots, arrival(prompts[start : start + at_once], new, **sizes))
        return slots

    def _compacted(self, slots: Slots) -> Slots:
        """Leaves free slots out where half of them or fewer will do."""
        held = [slot for slot, request in enumerate(self._holder) if request is not None]
        parts = self._generator.parts(len(self._holder))
        size = max(parts * _power_of_two(-(-len(held) // parts)), _LEAST_SLOTS)
        if 2 * size > len(self._holder):
            return slots
        free = [slot for slot, request in enumerate(self._holder) if request is None]
        kept = held + free[: size - len(held)]
        self._holder = [self._holder[slot] for slot in kept]
        self._cancelled = self._cancelled[kept]
        return self._generator.compact(slots, np.array(kept, np.int32))


def _padded(prompt: int) -> int:
    """The length to which a prompt of so many tokens is padded, without its last token."""
    return max(_LEAST_PROMPT, _power_of_two(prompt - 1))


def _power_of_two(number: int) -> int:
    """The first one that is not below."""
    return 1 << max(number - 1, 0).bit_length()


def _rounded(number: int, least: int) -> int:
    """Up to a multiple of `least`, or of an eighth of the power of two above: by a quarter at most."""
    step = max(least, _power_of_two(number) // 8)
    return -(-number // step) * step
