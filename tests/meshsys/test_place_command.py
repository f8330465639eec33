"""`meshsys cluster place` at the command line."""

from __future__ import annotations

import json

import pytest

from meshsys.cli import main

CUBES = ["cluster", "place", "--topology", "16x16x16", "--cube", "4"]
TORUS = ["cluster", "place", "--topology", "8x8x8"]


def test_text(capsys) -> None:
    assert main([*CUBES, "--shape", "4x4x8"]) == 0
    out = capsys.readouterr().out
    assert "fold      4x4x8\n" in out and "cubes     0, 1\n" in out
    assert "rings     x, y, z\ndilation  1\nwireable  yes\n" in out
    assert "order     0,0,0 0,0,1 0,0,2 0,0,3 0,0,4" in out and "112 more (--json has all)" in out


@pytest.mark.parametrize("policy", ["first_fit", "folding", "reconfig", "rfold", "hilbert", "risa", "best"])
def test_json(capsys, policy) -> None:
    assert main([*CUBES, "--shape", "4x6", "--policy", policy, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["policy"] == policy and found["shape"] == [4, 6]
    order = found["device_order"]
    assert len(order) == 24 == len({tuple(place) for place in order})
    assert all(0 <= place < 16 for chip in order for place in chip)
    if policy == "best":
        assert (found["dilation"], found["wireable"]) == (1, True)


def test_a_line_of_which_a_ring_is_asked(capsys) -> None:
    assert main([*TORUS, "--shape", "100", "--wrap", "x", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["wrap"] == found["wrap_asked"] == ["x"] and found["dilation"] == 1
    order = [tuple(place) for place in found["device_order"]]
    for one, other in zip(order, order[1:] + order[:1], strict=True):
        steps = [min(abs(x - y), 8 - abs(x - y)) for x, y in zip(one, other, strict=True)]
        assert sum(steps) == 1


def test_occupied(capsys, tmp_path) -> None:
    boxes = tmp_path / "boxes.csv"
    boxes.write_text("x,y,z,dx,dy,dz\n0,0,0,8,8,4\n\n0,0,4,8,8,3\n")
    assert main([*TORUS, "--shape", "8x8", "--occupied", str(boxes), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {place[2] for place in found["device_order"]} == {7}
    listed = tmp_path / "boxes.json"
    listed.write_text('[{"at": [0, 0, 0], "box": [8, 8, 4]}, {"at": [0, 0, 4], "box": [8, 8, 3]}, [0, 0, 7]]')
    assert main([*TORUS, "--shape", "8x8", "--occupied", str(listed)]) == 1
    assert capsys.readouterr().out == "meshsys: no room now for 8x8 on 8x8x8: 63 of 512 chips are free\n"


def test_shared_links(capsys, tmp_path) -> None:
    wall = tmp_path / "wall.csv"
    wall.write_text("".join(f"{x},{y},{z}\n" for x in (1, 3, 5, 7) for y in range(8) for z in range(8)))
    hilbert = [*TORUS, "--shape", "200", "--policy", "hilbert", "--occupied", str(wall), "--allow-shared-links"]
    assert main([*hilbert, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["shared_links"] == 0  # single chips have no traffic of their own


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "4x"], "--shape=4x is not a shape; write up to 6 sizes of at least 1, as in 4x4x8"),
        (["--shape", "16x16x17"], "--shape=16x16x17 has 4352 chips, but 16x16x16 in cubes of 4 has 4096;"),
        (["--shape", "4", "--wrap", "y"], "--wrap=y: the shape has no dimension 'y'; it has x"),
        (["--shape", "4", "--policy", "rfld"], "--policy=rfld does not exist; did you mean rfold?"),
        (["--shape", "4", "--cube", "5"], "--cube=5: 16x16x16 is not made of cubes of 5 a side; use a cube of 2 or 4"),
        (["--shape", "4", "--cube", "0"], "argument --cube: 0 must be an integer of at least 1"),
        (["--shape", "4", "--wiring", "sam"], "argument --wiring: sam is not a choice; use same_position, any"),
        (["--shape", "4", "--topology", "v5p:3x3x3"], "--topology=v5p:3x3x3 is not a shape of v5p slices;"),
        (["--shape", "4", "--topology", "x"], "--topology='x' is not a torus;"),
        (["--shape", "32", "--policy", "first_fit"], "--shape=32 has no place on 16x16x16 in cubes of 4 with"),
        (["--shape", "4", "--occupied", "missing.csv"], "--occupied=missing.csv cannot be read: No such file"),
        (["--shape", "4", "--occupied", "twice.csv"], "--occupied=twice.csv, line 2: chip 1,1,1 is taken already by"),
        (["--shape", "4", "--occupied", "out.csv"], "--occupied=out.csv, line 1: 14,0,0 of 4x1x1 is not within 16x16"),
        (
            ["--shape", "4", "--occupied", "words.csv"],
            "--occupied=words.csv, line 2: 1,b,2 is neither a chip nor a",
        ),
        (["--shape", "4", "--occupied", "half.json"], "--occupied=half.json is not JSON:"),
        (["--shape", "4", "--occupied", "object.json"], "--occupied=object.json is not a list;"),
        (["--shape", "4", "--occupied", "odd.json"], "--occupied=odd.json, entry 1: 1,2 is neither a chip nor a box"),
        (["--shape", "4", "--occupied", "real.json"], "--occupied=real.json, entry 1: 0.5,1,2 is neither a chip"),
    ],
    ids=str,
)
def test_bad_input(capsys, monkeypatch, tmp_path, arguments, message) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "twice.csv": "0,0,0,2,2,2\n1,1,1\n",
        "out.csv": "14,0,0,4,1,1\n",
        "words.csv": "1,1,1\n1,b,2\n",
        "half.json": "[[1, 2",
        "object.json": '{"at": [0, 0, 0]}',
        "odd.json": "[[1, 2]]",
        "real.json": "[[0.5, 1, 2]]",
    }.items():
        (tmp_path / name).write_text(text)
    assert main([*CUBES, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(f"meshsys: error: {message}")
    assert captured.err.count("\n") == 1
