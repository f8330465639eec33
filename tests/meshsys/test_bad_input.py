"""What a hostile or clumsy user types, through the real command line: each mistake is one line that names the option,
its value and the way out, and leaves nothing behind. What is merely odd is in test_odd_input.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshsys.cli import main
from tests.meshsys.user_files import GOOD, TWO_RANKS, content, write

ROOT = Path(__file__).resolve().parents[2]

AUTO = ["pipeline.remat=auto"]
CAP = "pipeline.activation_memory="

# CSV schedules for two ranks and two microbatches: (what the file holds, what the message must hold).
BAD_CSV = {
    "empty": ("", "the file holds no action; write one row a rank"),
    "only bubbles": (",,\n,,\n", "the file holds no action; write one row a rank"),
    "words": ("rank,action\n0,0F0\n", "rank 0, cell 1: 'rank' is not an action; write stage"),
    "semicolons": (TWO_RANKS.replace(",", ";"), "rank 0, cell 1: '0F0;0F1;0I0;0W0;0I1;0W1' is not an action; write"),
    "numbers": ("0,1\n", "rank 0, cell 1: '0' is not an action; write stage"),
    "unknown kind": (TWO_RANKS.replace("0F1", "0X1"), "rank 0, cell 2: '0X1' is not an action; write stage"),
    "small letters": (TWO_RANKS.replace("0F1", "0f1"), "rank 0, cell 2: '0f1' is not an action; write stage"),
    "negative microbatch": (TWO_RANKS.replace("0F1", "0F-1"), "rank 0, cell 2: '0F-1' is not an action; write stage"),
    "huge microbatch": (TWO_RANKS.replace("0F1", "0F12345678"), "rank 0, cell 2: '0F12345678' is not an action; write"),
    "far microbatch": (TWO_RANKS.replace("0F1", "0F999999"), "rank 0, action 0F1 is missing; every stage runs"),
    "half a pair": ("(0F0;1B0)\n1F0\n", "rank 0, cell 1: '(0F0;1B0)' is not an action; write stage"),
    "sends": (TWO_RANKS.replace("0F1", "0SEND_F1,0F1"), "rank 0, cell 2: '0SEND_F1' is communication; export the"),
    "unshard": ("0UNSHARD," + TWO_RANKS, "rank 0, cell 1: '0UNSHARD' is communication; export the compute-only form"),
    "unknown stage": (TWO_RANKS.replace("1F1", "7F1"), "stage 2 is on no rank; stages are numbered 0, 1, 2"),
    "gap": (TWO_RANKS.replace("1F", "2F").replace("1I", "2I").replace("1W", "2W"), "stage 1 is on no rank; stages"),
    "idle rank": ("\n".join(["0F0,0B0", ",", "1F0,1B0"]), "rank 1 runs no stage; give it one or remove the rank"),
    "stage on two ranks": (TWO_RANKS + "1F2\n", "rank 2, action 1F2: stage 1 is on rank 1 already; a stage runs on"),
    "twice": (TWO_RANKS.replace("0F1", "0F1,0F1"), "rank 0, action 0F1 is there twice, as the rank's actions 2 and 3;"),
    "no F": (TWO_RANKS.replace("1F1,", ""), "rank 1, action 1F1 is missing; every stage runs microbatches 0 to 1"),
    "no W": (TWO_RANKS.replace(",0W1", ""), "rank 0, action 0W1 is missing; 0I1 is half a backward: add it"),
    "no I": (TWO_RANKS.replace("0I1,", ""), "rank 0, action 0I1 is missing; 0W1 is half a backward: add it"),
    "no backward": (TWO_RANKS.replace(",0I1,0W1", ""), "rank 0, action 0I1 is missing; after 0F1 add I and W"),
    "B and W": (TWO_RANKS.replace("0I1", "0B1"), "rank 0, action 0W1 repeats a part of 0B1, the full backward; write"),
    "I before F": (TWO_RANKS.replace("1F1,1I1", "1I1,1F1"), "rank 1, action 1I1 comes before 1F1, whose result it"),
    "W before I": (TWO_RANKS.replace("0I0,0W0", "0W0,0I0"), "rank 0, action 0W0 comes before 0I0, whose result it"),
    "R after I": (TWO_RANKS.replace("0I1,", "0I1,0R1,"), "rank 0, action 0R1 recomputes what 0I1 has used already;"),
    "deadlock": (
        TWO_RANKS.replace("0F0,0F1,0I0,0W0", "0F0,0I0,0F1,0W0").replace("1F0,1I0,1W0,1F1", "1F0,1F1,1I0,1W0"),
        "deadlock: rank 0, action 0I0 waits for 1I0, which rank 1 has after 1F1; ",
    ),
    "open quote": ('"0F0,0F1\n', "is not an action; write stage"),
    "a megabyte in a cell": ("0" * 1_000_000, "rank 0: field larger than field limit (131072); write one row a rank"),
    "zero bytes": ("\0\0\0\0", "is not an action; write stage"),
    "binary": (b"\x89PNG\r\n\x1a\n\xff\xfe", "is not text; give the path of a CSV file"),
    "UTF-16": (TWO_RANKS.encode("utf-16"), "is not text; give the path of a CSV file"),
    "three ranks": (
        "0F0,0B0\n1F0,1B0\n2F0,2B0\n",
        "mesh.axes.pipe=2, but pipeline.schedule=csv:bad.csv is made for 3;",
    ),
    "one microbatch": (
        "0F0,0B0\n1F0,1B0\n",
        "pipeline.microbatches=2, but pipeline.schedule=csv:bad.csv is made for 1",
    ),
}

BAD_TOKENIZERS = {
    "empty.json": b"",
    "words.json": b"not JSON",
    "list.json": b"[]",
    "other.json": b'{"version": "1.0"}',
    "no_model.json": b'{"version":"1.0","added_tokens":[],"model":{"type":"Magic"}}',
    "binary.json": b"\xff\xfe\x00",
    "empty.model": b"",
    "words.model": b"not a model",
    "binary.model": b"\x00\xff\x0a\x0b" * 9,
}

# What `data.source` cannot be: (file name, content, what the message must hold).
BAD_DATA = {
    "empty file": ("empty.txt", b"", "data.source=empty.txt holds no text; name files"),
    "binary": ("binary.txt", b"\x89PNG\xff", "data.source=binary.txt: binary.txt is not UTF-8 (byte 0); convert it"),
    "empty JSONL": ("a.jsonl", b"\n\n", "data.source=a.jsonl holds no text; name files"),
    "no field": ("a.jsonl", b'{"text": "a"}\n{"body": "b"}\n', "a.jsonl:2 has no text in data.text_field=text"),
    "field of numbers": ("a.jsonl", b'{"text": 5}\n', "a.jsonl:1 has no text in data.text_field=text;"),
    "broken line": ("a.jsonl", b'{"text": "a"}\n{"text": \n', "data.source=a.jsonl: a.jsonl:2 is not JSON (Expecting"),
    "list in a line": ("a.jsonl", b'["a"]\n', "data.source=a.jsonl: a.jsonl:1 is not a JSON object; mend or remove"),
    "binary JSONL": ("a.jsonl", b"\x00\xff\n", "data.source=a.jsonl: a.jsonl:1 is not UTF-8 (byte 1); convert"),
    "deep JSONL": ("a.jsonl", b"[" * 99_999, "data.source=a.jsonl: a.jsonl:1 is nested too deeply; mend"),
    "huge number": ("a.jsonl", b'{"text": ' + b"9" * 5000 + b"}", "data.source=a.jsonl: a.jsonl:1 is not JSON ("),
    "half a character": ("a.jsonl", b'{"text": "\\ud800"}', "data.source=a.jsonl: a.jsonl:1 holds half of a surrogate"),
}

# Overrides of GOOD, and what the message must hold.
BAD_OPTIONS: dict[str, tuple[list[str], str]] = {
    # types
    "word for integer": (["model.layers=four"], "model.layers=four is not an integer; "),
    "quoted integer": (["model.layers='4'"], "model.layers='4' is not an integer; "),
    "hexadecimal": (["model.layers=0x10"], "model.layers=0x10 is not an integer; "),
    "octal": (["train.steps=0o7"], "train.steps=0o7 is not an integer; "),
    "thousands": (["train.steps=1_000"], "train.steps=1_000 is not an integer; "),
    "comma": (["train.steps=1,000"], "train.steps=1,000 is not an integer; "),
    "unit": (["data.batch_size=8k"], "data.batch_size=8k is not an integer; "),
    "float for integer": (["model.heads=2.0"], "model.heads=2.0 is not an integer; "),
    "bool for integer": (["data.batch_size=true"], "data.batch_size=true is not an integer; "),
    "nothing for integer": (["train.steps="], "train.steps=null is not an integer; "),
    "space for integer": (["train.steps= "], "train.steps=null is not an integer; "),
    "list for integer": (["model.d_ff=[1, 2]"], "model.d_ff=[1, 2] is not an integer; "),
    "mapping for integer": (["model.d_ff={a: 1}"], "model.d_ff={a: 1} is not an integer; "),
    "open mapping for integer": (["model.d_ff={a"], "model.d_ff='{a' is not an integer; "),
    "digits beyond counting": ([f"train.steps={'9' * 5000}"], "... is not an integer; "),
    "word for number": (["train.learning_rate=high"], "train.learning_rate=high is not a number; "),
    "comma in a number": (["train.learning_rate=0,1"], "train.learning_rate=0,1 is not a number; "),
    "percentage": (["model.dropout=10%"], "model.dropout=10% is not a number; "),
    "bool for number": (["train.weight_decay=false"], "train.weight_decay=false is not a number; "),
    "quoted number": (["train.learning_rate='1e-3'"], "train.learning_rate='1e-3' is not a number; "),
    "word for bool": (["model.tie_embeddings=ja"], "model.tie_embeddings=ja is neither true nor false; "),
    "integer for bool": (["pipeline.split_backward=0"], "pipeline.split_backward=0 is neither true nor false; "),
    "quoted bool": (["train.skip_nonfinite='true'"], "train.skip_nonfinite='true' is neither true nor false; "),
    "number for text": (["data.source=1.5"], "data.source=1.5 is not text; write one value, in quotes"),
    "null for text": (["data.source="], "data.source=null is not text; "),
    "list for text": (["data.source=[a.txt, b.txt]"], "data.source=[a.txt, b.txt] is not text; "),
    "bool for a name": (["run.name=true"], "run.name=true is not text; "),
    "list for the schedule": (["pipeline.schedule=[1f1b]"], "pipeline.schedule=[1f1b] is not text; "),
    # names
    "section": (["modle.layers=4"], "modle.layers=4 is not an option; did you mean model.layers?"),
    "key": (["model.layer=4"], "model.layer=4 is not an option; did you mean model.layers?"),
    "key of another section": (["model.batch_size=4"], "model.batch_size=4 is not an option; did you mean data.batch"),
    "axis": (["mesh.axes.pip=2"], "mesh.axes.pip=2 is not an option; did you mean mesh.axes.pipe?"),
    "axis without axes": (["mesh.pipe=2"], "mesh.pipe=2 is not an option; did you mean mesh.axes.pipe?"),
    "axes in a mapping": (["mesh.axes={pip: 2}"], "mesh.axes.pip=2 is not an option; did you mean mesh.axes.pipe?"),
    "no section": (["layers=4"], "layers=4 is not an option; did you mean model.layers?"),
    "capitals": (["Model.Layers=4"], "Model.Layers=4 is not an option; did you mean model"),
    "dashes": (["--train.steps=4"], "unrecognized: --train.steps=4; see "),
    "empty parts": (["train..steps=4"], "train..steps=4 is not an option; "),
    "only dots": (["...=4"], "...=4 is not an option; "),
    "empty key": (["=4"], "=4 is not an option; "),
    "unlike anything": (["zzz.qqq=4"], "zzz.qqq=4 is not an option; the file has run, model"),
    "below a value": (["train.steps.max=4"], "train.steps.max=4 is not an option; train.steps holds a single value"),
    "no equals sign": (["train.steps"], "the override `train.steps` has no `=`; write section.key=value"),
    "colon": (["train.steps:4"], "the override `train.steps:4` has no `=`; write section.key=value"),
    "split by the shell": (["train.steps=4", "=", "5"], " is not an option; "),
    "section as a word": (["train=fast"], "train=fast is not a mapping; give it keys (steps,"),
    "section as null": (["model="], "model=null is not a mapping; give it keys (layers,"),
    "section as a list": (["mesh.axes=[2, 2]"], "mesh.axes=[2, 2] is not a mapping; give it keys (pipe,"),
    # ranges
    "no layers": (["model.layers=0"], "model.layers=0 must be at least 1; "),
    "negative width": (["model.d_model=-16"], "model.d_model=-16 must be at least 1; "),
    "no heads": (["model.heads=0"], "model.heads=0 must be at least 1; "),
    "negative kv heads": (["model.kv_heads=-1"], "model.kv_heads=-1 must be at least 0; "),
    "negative vocabulary": (["model.vocab_size=-5"], "model.vocab_size=-5 must be at least 0; "),
    "dropout of 1": (["model.dropout=1"], "model.dropout=1.0 must be at least 0 and below 1; "),
    "negative dropout": (["model.dropout=-0.1"], "model.dropout=-0.1 must be at least 0 and below 1; "),
    "no rope": (["model.rope_theta=0"], "model.rope_theta=0.0 must be above 0; "),
    "negative epsilon": (["model.norm_epsilon=-1e-5"], "model.norm_epsilon=-1e-05 must be above 0; "),
    "no steps": (["train.steps=0"], "train.steps=0 must be at least 1; "),
    "negative steps": (["train.steps=-3"], "train.steps=-3 must be at least 1; "),
    "no learning rate": (["train.learning_rate=0"], "train.learning_rate=0 must be above 0; "),
    "learning rate NaN": (["train.learning_rate=.nan"], "train.learning_rate=.nan is not a finite number; "),
    "learning rate nan": (["train.learning_rate=nan"], "train.learning_rate=nan is not a number; "),
    "weight decay infinite": (["train.weight_decay=.inf"], "train.weight_decay=.inf is not a finite number; "),
    "clip overflow": (["train.gradient_clip=1e999"], "train.gradient_clip=.inf is not a finite number; "),
    "dropout NaN": (["model.dropout=.nan"], "model.dropout=.nan "),
    "theta infinite": (["model.rope_theta=.inf"], "model.rope_theta=.inf is not a finite number; "),
    "epsilon NaN": (["model.norm_epsilon=.nan"], "model.norm_epsilon=.nan is not a finite number; "),
    "negative clip": (["train.gradient_clip=-1"], "train.gradient_clip=-1 must be at least 0; "),
    "negative warm-up": (["train.warmup_steps=-1"], "train.warmup_steps=-1 must be at least 0; "),
    "fraction above 1": (["train.final_learning_rate_fraction=10"], "train.final_learning_rate_fraction=10 must be at"),
    "huge steps": (["train.steps=99999999999"], "train.steps=99999999999 must be at most 2147483647; "),
    "huge model": (["model.layers=99999999999"], "model.layers=99999999999 must be at most "),
    "huge width": (["model.d_model=99999999999999999999"], "model.d_model=99999999999999999999 must be at most "),
    "huge heads": (["model.heads=9999999999"], "model.heads=9999999999 must be at most "),
    "huge vocabulary": (["model.vocab_size=999999999999"], "model.vocab_size=999999999999 must be at most "),
    "huge seed": (["run.seed=9999999999"], "run.seed=9999999999 must be at most "),
    "huge axis": (["mesh.axes.data=99999999999"], "mesh.axes.data=99999999999 must be at most "),
    "huge learning rate": (["train.learning_rate=1e300"], "train.learning_rate=1.0e+300 must be at most 1e+30; "),
    "huge epsilon": (["model.norm_epsilon=1e300"], "model.norm_epsilon=1e+300 must be at most 1; "),
    "huge integer for number": ([f"train.learning_rate={10**400}"], "... is not a number; write one"),
    "huge microbatches": (
        ["pipeline.microbatches=2000000000"],
        "pipeline.microbatches=2000000000; set data.batch_size",
    ),
    "huge microbatches and batch": (
        ["pipeline.microbatches=2000000000", "data.batch_size=2000000000"],
        "pipeline.microbatches=2000000000 is too large for 1f1b; use 262144 or less",
    ),
    "huge chunks": (
        ["pipeline.schedule=interleaved_1f1b", "pipeline.chunks=2000000000"],
        "pipeline.chunks=2000000000 is too large for interleaved_1f1b; use 1024 or less",
    ),
    "empty batch": (["data.batch_size=0"], "data.batch_size=0 must be at least 1; "),
    "short sequences": (["data.sequence_length=1"], "data.sequence_length=1 must be at least 2; "),
    "keep none": (["checkpoint.keep=0"], "checkpoint.keep=0 must be at least 1; "),
    "save never": (["checkpoint.every=never"], "checkpoint.every=never is not an integer; "),
    "negative seed": (["run.seed=-1"], "run.seed=-1 must be at least 0; "),
    # choices
    "dtype": (["model.dtype=float16"], "model.dtype=float16 is not a choice; use float32 or bfloat16"),
    "param dtype": (["model.param_dtype=fp8"], "model.param_dtype=fp8 is not a choice; use float32 or bfloat16"),
    "gather": (["pipeline.fsdp_gather=always"], "pipeline.fsdp_gather=always is not a choice; use step or tick"),
    "schedule": (["pipeline.schedule=1f1p"], "pipeline.schedule=1f1p: schedule '1f1p' is unknown; did you mean '1f1b'"),
    "schedule in capitals": (["pipeline.schedule=GPipe"], "pipeline.schedule=GPipe: schedule 'GPipe' is unknown; did"),
    "schedule unlike any": (["pipeline.schedule=zzz"], "pipeline.schedule=zzz: schedule 'zzz' is unknown; use one of"),
    "remat": (["pipeline.remat=half"], "pipeline.remat=half is not a policy; use none, full, dots"),
    "remat no": (["pipeline.remat=false"], "pipeline.remat=false is not text; "),
    "remat without names": (["pipeline.remat='names:'"], "pipeline.remat='names:' is not a policy; use"),
    "remat names of none": (["pipeline.remat=none:mlpwi_0"], "pipeline.remat=none:mlpwi_0 is not a policy; use"),
    "remat unknown name": (["pipeline.remat=names:mlp"], "pipeline.remat=names:mlp names nothing that the model marks"),
    "remat one unknown name": (["pipeline.remat=offload:context,q"], "pipeline.remat=offload:context,q names nothing"),
    "remat without effect": (["pipeline.remat=names:mlpwo"], "pipeline.remat=names:mlpwo has no effect for mlpwo: the"),
    "offload without effect": (["pipeline.remat=offload:mlpwo,out_proj"], "pipeline.remat=offload:mlpwo,out_proj has"),
    "remat partly idle": (["pipeline.remat=names:context,mlpwo"], "pipeline.remat=names:context,mlpwo has no effect"),
    "auto without a cap": (["pipeline.remat=auto"], "pipeline.remat=auto chooses within pipeline.activation_memory"),
    "cap without auto": (
        ["pipeline.activation_memory=2GiB"],
        "pipeline.activation_memory=2GiB is for pipeline.remat=auto, and pipeline.remat=none",
    ),
    "cap with a policy": (
        ["pipeline.activation_memory=64", "pipeline.remat=full"],
        "pipeline.activation_memory=64 is for pipeline.remat=auto, and pipeline.remat=full",
    ),
    "cap in words": ([*AUTO, CAP + "much"], CAP + "much is not a size; write"),
    "cap in decimal units": ([*AUTO, CAP + "2GB"], CAP + "2GB is not a size; "),
    "cap without a number": ([*AUTO, CAP + "GiB"], CAP + "GiB is not a size"),
    "cap as a float": ([*AUTO, CAP + "1e9"], CAP + "1000000000.0 is not a size"),
    "cap as truth": ([*AUTO, CAP + "yes"], CAP + "yes is not a size; write"),
    "cap as a list": ([*AUTO, CAP + "[1]"], CAP + "[1] is not a size; write"),
    "no cap": ([*AUTO, CAP + "0"], CAP + "0 is not a size; use 1 byte to"),
    "negative cap": ([*AUTO, CAP + "-5"], CAP + "-5 is not a size; use 1 byte"),
    "huge cap": ([*AUTO, CAP + "9999TiB"], CAP + "9999TiB is not a size; use 1"),
    "cap too small": ([*AUTO, CAP + "1KiB"], CAP + "1KiB is too small: at least"),
    "auto and R": (
        [*AUTO, CAP + "1GiB", "pipeline.split_recompute=true"],
        "pipeline.split_recompute=true is what pipeline.remat=auto decides",
    ),
    "auto and R in the schedule": (
        [*AUTO, CAP + "1GiB", "pipeline.schedule=csv:recompute.csv"],
        "pipeline.remat=auto places R itself, and pipeline.schedule=csv:recompute.csv has R actions; remove them",
    ),
    "auto without a flush": (
        [*AUTO, CAP + "1GiB", "pipeline.schedule=pipedream_2bw"],
        "pipeline.remat=auto needs a schedule that ends with a flush",
    ),
    # names of runs
    "slashes": (["run.name=a/b"], "run.name=a/b is not a folder name; use letters"),
    "parent": (["run.name=.."], "run.name=.. is not a folder name; use letters"),
    "hidden": (["run.name=.tiny"], "run.name=.tiny is not a folder name; use letters"),
    "spaces": (["run.name=my run"], "run.name=my run is not a folder name; use letters"),
    "no name": (["run.name="], "run.name=null is not text; "),
    "empty name": (["run.name=''"], "run.name='' is not a folder name; use letters"),
    "long name": ([f"run.name={'x' * 300}"], "... is not a folder name; use letters"),
    "line break": (['run.name="a\\nb"'], "run.name='a\\nb' is not a folder name; use letters"),
    "zero byte in a name": (['run.name="a\\0b"'], "run.name='a\\x00b' is not a folder name; use letters"),
    "empty dir": (["run.dir=''"], "run.dir='' is empty; give it a value"),
    "dir is a number": (["run.dir=5"], "run.dir=5 is not text; write one value, in quotes"),
    "bytes in dir": (["run.dir=\udcff"], "run.dir='\\udcff' is not valid Unicode; write it in UTF-8"),
    "zero byte in dir": (['run.dir="a\\0b"'], "run.dir='a\\x00b' "),
    # the model's own rules
    "heads": (["model.heads=3"], "model.heads=3 does not divide model.d_model=16; use 2 or 4"),
    "kv heads": (["model.kv_heads=3"], "model.kv_heads=3 does not divide model.heads=2; use"),
    "odd heads": (["model.heads=16"], "model.heads=16 gives heads of 1 dimensions; RoPE rotates pairs"),
    "small vocabulary": (
        ["model.vocab_size=100"],
        "model.vocab_size=100 is below the 264 tokens of data.tokenizer=bytes",
    ),
    # meshes
    "topology word": (["mesh.topology=cube"], "mesh.topology=cube is not a torus; write sizes"),
    "topology zero": (["mesh.topology=0"], "mesh.topology=0 is not a torus; write sizes"),
    "topology negative": (["mesh.topology=-8"], "mesh.topology=-8 is not a torus; write sizes"),
    "topology float": (["mesh.topology=2.5"], "mesh.topology=2.5 is not text; "),
    "topology null": (["mesh.topology="], "mesh.topology=null is not text; "),
    "topology list": (["mesh.topology=[2, 2]"], "mesh.topology=[2, 2] is not text; "),
    "topology stars": (["mesh.topology=2*2"], "mesh.topology=2*2 is not a torus; write sizes"),
    "topology comma": (["mesh.topology='2,2'"], "mesh.topology=2,2 is not a torus; write sizes"),
    "topology end": (["mesh.topology=2x"], "mesh.topology=2x is not a torus; write sizes"),
    "topology capital": (["mesh.topology=2X2"], "mesh.topology=2X2 is not a torus; write sizes"),
    "topology generation alone": (["mesh.topology=v5p"], "mesh.topology=v5p is not a torus; write sizes"),
    "topology GPU": (["mesh.topology=h100:8"], "mesh.topology=h100:8: no TPU generation is called 'h100'; "),
    "topology generation": (["mesh.topology=v5q:4x4x4"], "mesh.topology=v5q:4x4x4: no TPU generation is called 'v5q';"),
    "topology shape": (["mesh.topology=v5p:3x3x3"], "mesh.topology=v5p:3x3x3 is not a shape of v5p slices; "),
    "topology dimensions": (["mesh.topology=v5p:4x4"], "mesh.topology=v5p:4x4 is not a shape of v5p slices; "),
    "topology flat": (["mesh.topology=v5e:2x2x2"], "mesh.topology=v5e:2x2x2 is not a shape of v5e slices; "),
    "topology pod": (["mesh.topology=v4:64x64x64"], "mesh.topology=v4:64x64x64 is not a shape of v4 slices; "),
    "topology huge": (["mesh.topology=99999x99999"], "mesh.topology=99999x99999 has 9999800001 chips; "),
    "topology dimensions, many": ([f"mesh.topology={'1x' * 99}1"], " has 100 dimensions; the most is 6"),
    "topology endless": ([f"mesh.topology={'9' * 400}"], "... is not a torus; write sizes joined by `x`"),
    "axes over the torus": (["mesh.topology=2x2", "mesh.axes.pipe=8"], "mesh.axes.pipe=8: that is 8 devices, but mesh"),
    "product over the torus": (
        ["mesh.topology=2x2x2", "mesh.axes={pipe: 4, data: 2, tensor: 2}"],
        "mesh.axes.pipe=4, mesh.axes.data=2, mesh.axes.tensor=2: that is 16 devices, but mesh.topology=2x2x2 has 8; ",
    ),
    "axes on the default torus": (["mesh.axes.pipe=2"], "mesh.axes.pipe=2: that is 2 devices, but mesh.topology=1 has"),
    "experts": (["mesh.topology=2", "mesh.axes.expert=2"], "mesh.axes.expert=2, but this model has no experts; set"),
    "context": (
        ["mesh.topology=2", "mesh.axes.context=2", "data.sequence_length=18"],
        "data.sequence_length=18 is not a multiple of 2 x mesh.axes.context = 4, by which sequences are divided; set",
    ),
    "odd context": (
        ["mesh.topology=3", "mesh.axes.context=3"],
        "mesh.axes.context=3 is odd, and ring attention pairs the devices that share a sequence; set mesh.axes.context",
    ),
    "experts that do not divide": (
        ["mesh.topology=2", "mesh.axes.expert=2", "model.moe={experts: 3, experts_per_token: 1, d_ff: 8}"],
        "mesh.axes.expert=2 does not divide model.moe.experts=3; use 1 or 3",
    ),
    "more experts a token than there are": (
        ["model.moe={experts: 3, experts_per_token: 4, d_ff: 8}"],
        "model.moe.experts_per_token=4 must be at most 3; lower it",
    ),
    "dense layers": (
        ["model.moe={experts: 2, experts_per_token: 1, d_ff: 8, dense_layers: [99]}"],
        "model.moe.dense_layers has 99, but model.layers=",
    ),
    "latent": (["model.latent={kv_rank: 4, nope_dim: 4, rope_dim: 3, value_dim: 4}"], "model.latent.rope_dim=3 must"),
    "lora": (["model.lora={targets: [querry]}"], "model.lora.targets has 'querry'; use query, key"),
    "windows": (["model.window_pattern=[]"], "model.window_pattern is empty; give it one true or false for"),
    "pretrained": (["model.pretrained=nowhere"], "model.pretrained=nowhere: nowhere does not exist; give"),
    "tensor, heads": (["mesh.topology=4", "mesh.axes.tensor=4"], "mesh.axes.tensor=4 does not divide model.heads=2; "),
    "tensor, d_ff": (
        ["mesh.topology=2", "mesh.axes.tensor=2", "model.d_ff=33"],
        "mesh.axes.tensor=2 does not divide model.d_ff=33; use 1 or 3",
    ),
    "fsdp, d_model": (["mesh.topology=3", "mesh.axes.fsdp=3"], "mesh.axes.fsdp=3 does not divide model.d_model=16; "),
    "data, batch": (
        ["mesh.topology=3", "mesh.axes.data=3"],
        "data.batch_size=8 is not a multiple of pipeline.microbatches=1 x mesh.axes.data x mesh.axes.fsdp = 3; set",
    ),
    "batch of one": (
        ["mesh.topology=2", "mesh.axes.data=2", "data.batch_size=1"],
        "data.batch_size=1 is not a multiple",
    ),
    "microbatches": (
        ["pipeline.microbatches=3"],
        "data.batch_size=8 is not a multiple of pipeline.microbatches=3; set",
    ),
    "microbatches over batch": (["pipeline.microbatches=16"], "data.batch_size=8 is not a multiple of pipeline.micro"),
    "chunks": (["pipeline.chunks=2"], "pipeline.chunks=2: 1f1b has one stage a rank; set chunks=1 or use"),
    "chunks of gpipe": (
        ["pipeline.schedule=gpipe", "pipeline.chunks=3"],
        "pipeline.chunks=3: gpipe has one stage a rank",
    ),
    "chunks of zbv": (["pipeline.schedule=zbv", "pipeline.chunks=1"], "pipeline.chunks=1: zbv has 2 stages a rank;"),
    "group": (["pipeline.group=2"], "pipeline.group=2: 1f1b takes no group; leave it out, or use kfkb"),
    "group of csv": (
        ["mesh.topology=2", "mesh.axes.pipe=2", "pipeline={microbatches: 2, group: 2, schedule: 'csv:two.csv'}"],
        "pipeline.group=2, but the order of pipeline.schedule=csv:two.csv is given; leave it out",
    ),
    "chunks of csv": (
        ["mesh.topology=2", "mesh.axes.pipe=2", "pipeline={microbatches: 2, chunks: 2, schedule: 'csv:two.csv'}"],
        "pipeline.chunks=2, but pipeline.schedule=csv:two.csv is made for 1; set pipeline.chunks=1",
    ),
    # files
    "csv missing": (["pipeline.schedule=csv:nowhere.csv"], "pipeline.schedule=csv:nowhere.csv cannot be read: No such"),
    "csv a folder": (["pipeline.schedule=csv:folder"], "pipeline.schedule=csv:folder cannot be read: Is a directory;"),
    "csv without a path": (
        ["pipeline.schedule=csv:"],
        "pipeline.schedule={csv: null} is not text; write one value, in quotes",
    ),
    "csv of a stranger": (
        ["pipeline.schedule=csv:~nobody-here/a.csv"],
        "pipeline.schedule=csv:~nobody-here/a.csv cannot",
    ),
    "csv of zero bytes": (['pipeline.schedule="csv:a\\0b"'], "pipeline.schedule='csv:a\\x00b' "),
    "tokenizer missing": (["data.tokenizer=nowhere.json"], "data.tokenizer=nowhere.json: no such file; give bytes"),
    "tokenizer by name": (["data.tokenizer=byte"], "data.tokenizer=byte: no such file; give bytes"),
    "tokenizer of the hub": (
        ["data.tokenizer=meta-llama/Llama-3"],
        "data.tokenizer=meta-llama/Llama-3: no such file; ",
    ),
    "tokenizer a folder": (["data.tokenizer=folder"], "data.tokenizer=folder: no tokenizer.json or tokenizer.model in"),
    "tokenizer of another kind": (["data.tokenizer=text.txt"], "data.tokenizer=text.txt: of unknown kind; give bytes"),
    "tokenizer with a bad config": (
        ["data.tokenizer=bad_config"],
        "data.tokenizer=bad_config: bad_config/tokenizer_conf",
    ),
    "tokenizer empty": (["data.tokenizer=''"], "data.tokenizer='' is empty; give it a value"),
    "source missing": (["data.source=nowhere.txt"], "data.source=nowhere.txt: no file or folder of that name, and"),
    "source an empty folder": (["data.source=folder"], "data.source=folder: no *.txt *.md *.rst *.py *.jsonl; give"),
    "source by name": (["data.source=python_doc"], "data.source=python_doc: no file or folder of that name"),
    "source a glob of nothing": (["data.source=*.csvx"], "data.source=*.csvx: no file or folder of that name, and"),
    "source with zero byte": (['data.source="a\\0b"'], "data.source='a\\x00b' "),
    "source a long name": ([f"data.source={'x' * 5000}"], "... is too long; use at most 4096 characters"),
    "source that steers a terminal": (["data.source=\x1b[2J"], "data.source=\\x1b[2J: no file or folder of that name"),
    "tag": (["train.steps=!!int five"], "train.steps='!!int five' is not an integer; "),
    "nested too deeply": ([f"mesh.axes={'[' * 3000}"], "... is not a mapping; give it keys (pipe"),
}

# What the file given as CONFIG holds, and what the message must hold.
BAD_FILES: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "bad.yaml is empty; write a mapping of sections: run, model"),
    "comment": ("# nothing yet\n", "bad.yaml is empty; write a mapping"),
    "null": ("null\n", "bad.yaml is empty; write a mapping"),
    "list": ("- run: {name: tiny}\n", "bad.yaml holds [{run: {name: tiny}}]; write a mapping"),
    "word": ("tiny\n", "bad.yaml holds tiny; write a mapping"),
    "number": ("42\n", "bad.yaml holds 42; write a mapping"),
    "no run": ("train: {steps: 2}\n", "run.name is missing; give the run a name"),
    "no name": ("run: {seed: 2}\n", "run.name is missing; give the run a name"),
    "null section": ("run: {name: tiny}\ntrain:\n", "train=null is not a mapping; give it keys (steps"),
    "null axes": ("run: {name: tiny}\nmesh: {axes: }\n", "mesh.axes=null is not a mapping; give it keys (pipe"),
    "list for a section": ("run: [tiny]\n", "run=[tiny] is not a mapping; give it keys (name"),
    "word for a section": ("run: tiny\n", "run=tiny is not a mapping; give it keys (name"),
    "sections twice": (
        "run: {name: a}\nrun: {name: b}\n",
        "bad.yaml, line 2 is not valid YAML: the key `run` is in line 1",
    ),
    "keys twice": ("run:\n  name: a\n  name: b\n", "bad.yaml, line 3 is not valid YAML: the key `name` is in line 2"),
    "tab": ("run:\n\tname: tiny\n", "bad.yaml, line 2 is not valid YAML: found character '\\t' that cannot start any"),
    "indentation": ("run:\n  name: tiny\n   seed: 1\n", "bad.yaml, line 3 is not valid YAML: "),
    "open brace": ("run: {name: tiny\n", "bad.yaml, line 2 is not valid YAML: "),
    "open quote": ("run: {name: 'tiny}\n", "bad.yaml, line 2 is not valid YAML: "),
    "no colon": ("run: {name: tiny}\ntrain\n", "bad.yaml, line 3 is not valid YAML: "),
    "no space": ("run: {name: tiny}\ntrain:{steps: 5}\n", "train:{steps=5} is not an option; the file has run"),
    "JSON with a comma": ('{"run": {"name": "tiny"},,}', "bad.yaml, line 1 is not valid YAML: "),
    "merge key": ("a: &a {name: tiny}\nrun: {<<: *a}\n", "bad.yaml, line 2 is not valid YAML: the alias `*a`"),
    "alias to nothing": ("run: *there\n", "bad.yaml, line 1 is not valid YAML: found undefined alias"),
    "recursive": ("run: &r {name: *r}\n", "bad.yaml, line 1 is not valid YAML: the alias `*r`"),
    "recursive list": ("run: {name: tiny}\ntrain: &t [*t]\n", "bad.yaml, line 2 is not valid YAML: the alias `*t`"),
    "billion laughs": (
        "run:\n  name: tiny\nzzz:\n  a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"  b{i}: &b{i} [{','.join(['*' + ('a' if i == 0 else f'b{i - 1}')] * 9)}]\n" for i in range(12)),
        "bad.yaml, line 5 is not valid YAML: the alias `*a`",
    ),
    "deep": ("run: " + "[" * 5000 + "]" * 5000, "bad.yaml, line 1 is not valid YAML: it is nested too deeply; "),
    "tag": ("run: !!python/object/apply:os.getcwd []\n", "bad.yaml, line 1 is not valid YAML: could not determine a"),
    "own tag": ("run: !mine {name: tiny}\n", "bad.yaml, line 1 is not valid YAML: could not determine a constructor"),
    "two documents": ("run: {name: tiny}\n---\nrun: {name: tiny}\n", "bad.yaml, line 2 is not valid YAML: "),
    "key of a number": ("run: {name: tiny}\n5: 6\n", "bad.yaml, line 2 is not valid YAML: the key `5` is not text"),
    "key of a null": ("run: {name: tiny}\n~: 6\n", "bad.yaml, line 2 is not valid YAML: the key `None` is not text"),
    "not UTF-8": (b"run: {name: \xff\xfe}\n", "bad.yaml is not "),
    "binary": (b"\x00\x01\x02\x03", "bad.yaml is not valid YAML: "),
    "UTF-16": ("run: {name: tiny}\n".encode("utf-16"), "bad.yaml is not "),
    "control characters": ("run: {name: tiny\x07}\n", "bad.yaml is not valid YAML: "),
    "key with a line break": ('run: {name: tiny, "a\\nb": 1}\n', "run.a b=1 is not an option; run has name"),
    "dotted key": (
        "run: {name: tiny}\ntrain.steps: 5\n",
        "train.steps=5 is not an option as one key; write steps below train",
    ),
    "Python": ("from meshsys import train\ntrain()\n", "bad.yaml"),
    "several": ("run: {name: tiny, sed: 1}\ntrain: {stps: 1}\n", "run.sed=1 is not an option; did you mean run.seed?"),
}


@pytest.fixture
def refused(capsys, folder):
    """Runs a command that must fail, and returns its message."""

    def refused(*argv: str) -> str:
        before = content(folder)
        assert main(argv) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("meshsys: error: ") and err.endswith("\n") and err.count("\n") == 1
        assert "Traceback" not in err and len(err) < 500
        assert ";" in err  # and then the way out
        assert content(folder) == before
        return err

    return refused


both = pytest.mark.parametrize("command", ["train", "plan"])


@both
@pytest.mark.parametrize(("overrides", "wanted"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_options(refused, command, overrides, wanted):
    assert wanted in refused(command, "good.yaml", *overrides)


def test_a_huge_pipe(refused):
    asked = ["mesh.topology=65536", "mesh.axes.pipe=65536"]
    assert "mesh.axes.pipe=65536 is too large for 1f1b; use 1024" in refused("plan", "good.yaml", *asked)
    assert "mesh.topology=65536 needs 65536 devices, but JAX has" in refused("train", "good.yaml", *asked)


@both
@pytest.mark.parametrize(("held", "wanted"), BAD_FILES.values(), ids=BAD_FILES)
def test_files(refused, command, held, wanted):
    write("bad.yaml", held)
    assert wanted in refused(command, "bad.yaml")


@both
@pytest.mark.parametrize(("held", "wanted"), BAD_CSV.values(), ids=BAD_CSV)
def test_csv(refused, command, held, wanted):
    write("bad.csv", held)
    two = ["mesh.topology=2", "mesh.axes.pipe=2", "pipeline.microbatches=2"]
    message = refused(command, "good.yaml", *two, "pipeline.schedule=csv:bad.csv")
    assert "pipeline.schedule=csv:bad.csv" in message and wanted in message


@both
@pytest.mark.parametrize(("name", "held"), BAD_TOKENIZERS.items(), ids=BAD_TOKENIZERS)
def test_tokenizers(refused, command, name, held):
    write(name, held)
    message = refused(command, "good.yaml", f"data.tokenizer={name}")
    assert f"data.tokenizer={name}: {name} is not what its name says (" in message


@pytest.mark.parametrize(("name", "held", "wanted"), BAD_DATA.values(), ids=BAD_DATA)
def test_data(refused, name, held, wanted):
    """`plan` reads no data."""
    write(name, held)
    assert wanted in refused("train", "good.yaml", f"data.source={name}")


@both
@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("goood.yaml", "the configuration file goood.yaml does not exist; did you mean good.yaml?"),
        ("nowhere/a.yaml", "the configuration file nowhere/a.yaml does not exist; give the path of a YAML file"),
        ("folder", "the configuration file folder cannot be read: Is a directory; give the path"),
        ("good.yaml/a.yaml", "the configuration file good.yaml/a.yaml cannot be read: Not a directory; give"),
        ("x" * 300, "xxx cannot be read: File name too long; give the path of a YAML file"),
        ("", "the configuration file . cannot be read: Is a directory; give the path of a YAML file"),
        ("model.layers=4", "the configuration file model.layers=4 does not exist; give the path of a YAML file"),
    ],
)
def test_no_such_file(refused, command, path, wanted):
    assert wanted in refused(command, path)


@pytest.mark.parametrize(
    ("run_dir", "reason"),
    [
        ("text.txt", "File exists"),
        ("text.txt/below", "Not a directory"),
        ("new/folder/" + "x" * 300, "File name too long"),
        ("broken_link", "File exists"),
        ("/proc/nowhere", "No such file or directory"),
    ],
)
def test_run_dir(refused, folder, run_dir, reason):
    """Folders that were made on the way to one that could not be are gone again."""
    (folder / "broken_link").symlink_to("text.txt/nowhere")
    assert f"run.dir={run_dir} cannot be written: {reason}; set another run.dir" in refused(
        "train", "good.yaml", f"run.dir={run_dir}"
    )


def test_more_devices_than_there_are(refused):
    message = refused("train", "good.yaml", "mesh.topology=4x4")
    assert "mesh.topology=4x4 needs 16 devices, but JAX has 8 (cpu); " in message
    assert "JAX_NUM_CPU_DEVICES=16" in message


@pytest.mark.parametrize(
    "override", ["model.d_model=262144", "data.sequence_length=2000000000", "data.batch_size=1000000000"]
)
def test_more_memory_than_there_is(refused, override):
    message = refused("train", "good.yaml", override)
    assert override in message and " GiB; lower some of them" in message


@pytest.mark.parametrize("override", ["model.layers=four", "mesh.topology=2x", "pipeline.schedule=csv:nowhere.csv"])
def test_as_a_process(folder, override):
    before = content(folder)
    command = [sys.executable, "-m", "meshsys", "train", "good.yaml", override]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"meshsys: error: {override} ") and done.stderr.count("\n") == 1
    assert content(folder) == before


# The other commands


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (["list", "1f1b"], "unrecognized: 1f1b; "),
        (["list", "--stages", "4"], "unrecognized: --stages; "),
        (["show"], "required: NAME; "),
        (
            ["show", "zb-h1", "--stages", "4", "--microbatches", "4"],
            "schedule 'zb-h1' is unknown; did you mean 'zb_h1'?",
        ),
        (["show", "1f1b", "--stages"], "--stages: expected one argument; "),
        (["show", "1f1b", "--stages", "-1", "--microbatches", "4"], "--stages: -1 must be an integer of at least 1; "),
        (
            ["show", "1f1b", "--stages", "four", "--microbatches", "4"],
            "--stages: four must be an integer of at least 1; ",
        ),
        (
            ["show", "1f1b", "--stages", "1e3", "--microbatches", "4"],
            "--stages: 1e3 must be an integer of at least 1; ",
        ),
        (["show", "1f1b", "--stages", "4", "--microbatches", "nan"], "--microbatches: nan must be an integer of at"),
        (["show", "1f1b", "--stages", "9" * 30, "--microbatches", "4"], f"ranks={'9' * 30} is too large for 1f1b; use"),
        (
            ["show", "gpipe", "--stages", "4", "--microbatches", "9" * 9],
            "microbatches=999999999 is too large for gpipe;",
        ),
        (
            ["show", "gpipe", "--stages", "4", "--microbatches", "4", "--chunks", "2"],
            "chunks=2: gpipe has one stage a rank;",
        ),
        (["show", "1f1b", "--stages", "4", "--microbatches", "4", "--format", "png"], "png is not a choice; use text"),
        (["show", "1f1b", "--ranks", "4"], "unrecognized: --ranks"),
        (["show", "csv:"], "csv: cannot be read: Is a directory; give the path of a CSV file"),
        (["show", "csv:folder"], "csv:folder cannot be read: Is a directory; give the path of a CSV file"),
        (["show", "csv:nowhere.csv"], "csv:nowhere.csv cannot be read: No such file or directory; give"),
        (["show", "csv:~nobody-here/a"], "csv:~nobody-here/a cannot be read: No such file or directory; give"),
        (
            ["show", "csv:two.csv", "--microbatches", "3"],
            "--microbatches=3, but csv:two.csv has 2; leave the option out",
        ),
        (["show", "csv:text.txt"], "csv:text.txt: rank 0, cell 1: 'All is well that ends well.' is not an action; "),
    ],
)
def test_schedule(refused, argv, wanted):
    assert wanted in refused("schedule", *argv)


@pytest.mark.parametrize(("held", "wanted"), BAD_CSV.values(), ids=BAD_CSV)
def test_schedule_show_of_a_bad_csv(refused, capsys, held, wanted):
    write("bad.csv", held)
    if "is made for" in wanted:
        assert main(["schedule", "show", "csv:bad.csv"]) == 0
    else:
        message = refused("schedule", "show", "csv:bad.csv")
        assert "csv:bad.csv" in message and wanted.split(";")[0] in message


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (["--temperature", "hot"], "--temperature: hot must be a number of at least 0; "),
        (["--temperature", "inf"], "--temperature: inf must be a number of at least 0; "),
        (["--temperature", "1e300"], "--temperature: 1e300 must be at most 1e+30; "),
        (["--max-tokens", "1e3"], "--max-tokens: 1e3 must be an integer of at least 1; "),
        (["--max-tokens", "9" * 12], "--max-tokens: 999999999999 must be at most 1048576; "),
        (["--seed", "-1"], "--seed: -1 must be an integer of at least 0; "),
        (["--seed", "9" * 12], "--seed: 999999999999 must be at most 2147483647; "),
        (["--prompt", "\udcff"], "--prompt: '\\udcff' is not valid Unicode; write it in UTF-8"),
        ([], "good.yaml is no model; give a Hugging Face folder, a .gguf file, or a .bin file of llama2.c"),
    ],
)
def test_generate(refused, argv, wanted):
    assert wanted in refused("generate", "good.yaml", "--prompt", "a", *argv)


@pytest.mark.parametrize(
    ("name", "held", "wanted"),
    [
        (
            "text.txt",
            "",
            "runs/tiny is not a run: it has no config.yaml; give a folder that `meshsys train` or `meshsys rl` wrote",
        ),
        ("config.yaml", "", "runs/tiny/config.yaml is empty; write a mapping of sections"),
        ("config.yaml", b"\xff", "runs/tiny/config.yaml is not valid YAML: byte 0 is not UTF-8; save it as UTF-8"),
        ("config.yaml", "run: {nme: tiny}", "run.nme=tiny is not an option; did you mean run.name?"),
    ],
)
@pytest.mark.parametrize("argv", [["report"], ["generate", "--prompt", "a"]], ids=" ".join)
def test_runs_that_are_none(refused, argv, name, held, wanted):
    Path("runs/tiny").mkdir(parents=True)
    write(f"runs/tiny/{name}", held)
    assert wanted in refused(*argv, "tiny")


def test_run_without_a_checkpoint(refused):
    Path("runs/tiny").mkdir(parents=True)
    write("runs/tiny/config.yaml", GOOD)
    assert "runs/tiny has no checkpoint yet; train it first" in refused("generate", "tiny", "--prompt", "a")
    write("runs/tiny/checkpoints", "not a folder")
    assert "runs/tiny has no checkpoint yet; train it first" in refused("generate", "tiny", "--prompt", "a")


@pytest.mark.parametrize("held", ["", "[]", "{}", "{", b"\xff"], ids=repr)
def test_report_of_a_damaged_plan(refused, held):
    Path("runs/tiny").mkdir(parents=True)
    write("runs/tiny/config.yaml", GOOD)
    write("runs/tiny/plan.json", held)
    assert "runs/tiny/plan.json is not a plan; remove it" in refused("report", "tiny")


def test_report_that_cannot_be_written(refused):
    Path("runs/tiny/report.html").mkdir(parents=True)
    write("runs/tiny/config.yaml", GOOD)
    assert "runs/tiny/report.html cannot be written: Is a directory; " in refused("report", "tiny")


@pytest.mark.parametrize(
    "held",
    [b"\xff\x00\n", "[1]\n5\n{}\n", '{"step": 1, "loss": 1' + "0" * 400 + "}\n", "[" * 99_999, '{"step": 1'],
    ids=len,
)
def test_report_of_damaged_metrics(capsys, folder, held):
    """A line that is no record is passed over."""
    Path("runs/tiny").mkdir(parents=True)
    write("runs/tiny/config.yaml", GOOD)
    write("runs/tiny/metrics.jsonl", held)
    assert main(["report", "tiny"]) == 0
    assert capsys.readouterr() == ("runs/tiny/report.html\n", "")
