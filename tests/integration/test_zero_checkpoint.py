"""Checkpoints: whole or not there, for any number of ranks and any stage, and for plain torch."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal.zero
from shoal.errors import ConfigError
from shoal.run.decide.committed import Committed
from shoal.run.decide.state_name import StateName
from shoal.run.disk.checkpoint import copy_of, write
from shoal.run.join.shared_state import share
from shoal.state.disk.folder import FORMAT, seal
from shoal.train.training_state import TrainingState
from tests.integration import zero_cases as cases
from tests.integration.ranks import Failed, Ranks, ranks


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    """Processes for all tests of this module."""
    with ranks() as made:
        yield made


@pytest.fixture(scope="module")
def saved(pool: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of stage 2 on 4 ranks, after four steps; nothing else lies beside it."""
    path = tmp_path_factory.mktemp("saved") / "step-4"
    pool.play(4, cases.train_and_save, 2, str(path))
    assert [each.name for each in path.parent.iterdir()] == ["step-4"]
    return path


def uninterrupted() -> dict[str, torch.Tensor]:
    """Four steps on the data of 4 ranks, then three on that of 1."""
    model = cases.Odd()
    _, _, optimizer = cases.alone(4, "adamw", steps=4, model=model)
    return cases.alone(1, "adamw", steps=3, first=4, model=model, optimizer=optimizer)[0]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("count", [4, 3, 2, 1])
def test_any_number_of_ranks_goes_on(pool: Ranks, saved: Path, stage: int, count: int) -> None:
    """All ranks get the same three micro-batches, so that the result does not depend on how many they are: to the bit.

    Means of equal values are exact for 1, 2 and 4 ranks.
    """
    wanted = uninterrupted()
    for state, extra in pool.play(count, cases.load_and_train, stage, str(saved)):
        assert extra == cases.EXTRA
        assert state.keys() == wanted.keys()
        for name, value in wanted.items():
            if count == 3:
                assert torch.allclose(state[name], value, rtol=0, atol=1e-6), name
            else:
                assert torch.equal(state[name], value), name


@pytest.fixture(scope="module")
def matrix(pool: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Checkpoints of every stage on 1 to 4 ranks, after steps with the same data."""
    folder = tmp_path_factory.mktemp("matrix")
    for count in (1, 2, 3, 4):
        pool.play(count, cases.save_in_each_stage, str(folder))
    return sorted(str(each) for each in folder.iterdir())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "count", [pytest.param(4, marks=pytest.mark.long(full=True)), pytest.param(3, marks=pytest.mark.long), 2, 1]
)
def test_the_tiles_of_one_saved_piece_share_no_step_counter(
    pool: Ranks, matrix: list[str], stage: int, count: int
) -> None:
    """What any stage saved on 1 to 4 ranks, every stage loads on 1 to 4, and goes on from: weights and counters.

    A piece of stage 3 is cut into several tiles. They counted each other's steps, and trained wrongly without a word.
    """
    assert len(matrix) == 12
    wanted = cases.alone(1, "adamw")[0]
    for found in pool.play(count, cases.load_each, stage, matrix):
        for path, (state, counters, shared) in found.items():
            assert (counters, shared) == ([cases.STEPS], 0), path
            means_are_exact = count != 3 and not path.endswith("-3")
            for name, value in wanted.items():
                assert torch.allclose(state[name], value, rtol=0, atol=0 if means_are_exact else 1e-6), (path, name)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.parametrize("kind", ["laprop", "madgrad", "schedulefreeadamw"])
def test_what_an_optimizer_keeps_beside_tensors_is_saved(
    pool: Ranks, tmp_path: Path, kind: str, consolidated: bool
) -> None:
    """LaProp keeps Python's numbers, MADGRAD a count for no parameter, others some in groups: exactly as they were."""
    wanted = cases.alone(1, kind)[0]
    for state in pool.play(2, cases.saved_and_loaded, kind, 1, str(tmp_path), consolidated):
        assert all(torch.equal(state[name], value) for name, value in wanted.items())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_channels_last_is_kept_and_saved(pool: Ranks, tmp_path: Path, stage: int, dtype: torch.dtype | None) -> None:
    """In stages 1 and 2 parameters lost it; now tiles are cut in that order, and a checkpoint goes on in any other."""
    for found in pool.play(2, cases.channels_last, stage, str(tmp_path), dtype):
        assert found["kept"] == (stage < 3)
        assert found["apart"] == 0.0 or (stage == 3 and found["apart"] < 1e-5) or dtype is not None
        assert found["loaded"] == {
            "the same": True,
            "contiguous": True,
            "stage 3": True,
            "weights": True,
            "whole": True,
        }


@pytest.mark.one_in(3)
@pytest.mark.parametrize("how", ["a mapping", "safetensors", "torch.save"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_alone_are_loaded_into_a_sharded_model(pool: Ranks, tmp_path: Path, stage: int, how: str) -> None:
    """In every stage, tied ones under one name; the optimizer's statistics stay."""
    path = str(tmp_path / f"model.{'safetensors' if how == 'safetensors' else 'pt'}")
    for apart, kept, steps in pool.play(3, cases.load_weights, stage, how, path):
        assert (apart, kept, steps) == (0.0, True, 3)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_alone_are_loaded_into_a_model_that_computes_in_bfloat16(pool: Ranks, stage: int) -> None:
    """Rounded where it computes; what is stepped is not."""
    for apart, kept, _ in pool.play(2, cases.load_weights, stage, "a mapping", "", torch.bfloat16):
        assert apart < 0.02
        assert kept


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("lacks one", "lacks scale"),
        ("one more", "has other, which the model has not"),
        ("a shape", "scale in the state dictionary has the shape [2]"),
        ("not the same", "path must be of the same checkpoint on all ranks"),
        ("a number", "scale in the state dictionary is a float"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(pool: Ranks, how: str, words: str) -> None:
    """And all ranks say why."""
    assert all(words in said for said in pool.play(2, cases.load_bad_weights, how))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_consolidated_loads_in_plain_torch(pool: Ranks, tmp_path: Path, stage: int) -> None:
    """One file of two state dictionaries, that of the optimizer among them; training goes on as if nothing had been."""
    path = tmp_path / "whole.pt"
    pool.play(3, cases.train_and_save, stage, str(path), True)
    found = torch.load(path)
    assert found["extra"] == cases.EXTRA
    torch.manual_seed(9)
    model = cases.Odd()
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    model.load_state_dict(found["model"])
    optimizer = cases.make("adamw", model)([each for each in model.parameters() if each.requires_grad])
    optimizer.load_state_dict(found["optimizer"])
    state, _, _ = cases.alone(1, "adamw", steps=3, first=4, model=model, optimizer=optimizer)
    reference = cases.Odd()
    _, _, stepped = cases.alone(3, "adamw", steps=4, model=reference)
    wanted, _, _ = cases.alone(1, "adamw", steps=3, first=4, model=reference, optimizer=stepped)
    assert all(torch.equal(state[name], value) for name, value in wanted.items())
    assert [each.name for each in tmp_path.iterdir()] == ["whole.pt"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_checkpoint_of_plain_torch_goes_on_sharded(pool: Ranks, tmp_path: Path, stage: int) -> None:
    """A user that began without sharding loads both state dictionaries from one file."""
    model = cases.Odd()
    _, _, optimizer = cases.alone(4, "adamw", steps=4, model=model)
    path = tmp_path / "plain.pt"
    extra = {"epoch": 4}
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "extra": extra}, path)
    wanted = uninterrupted()
    for state, found in pool.play(2, cases.load_and_train, stage, str(path)):
        assert found == extra
        assert all(torch.equal(state[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_checkpoint_of_a_run_goes_on_sharded(pool: Ranks, tmp_path: Path, stage: int) -> None:
    """Weights, buffers, statistics and options, on any number of ranks; frozen weights, which a run lacks, stay."""
    model, run = cases.Odd(), StateName(4, bytes(32), 4)
    _, _, optimizer = cases.alone(4, "adamw", steps=4, model=model)
    training = TrainingState(optimizer)
    ours = {id(each) for each in (*training.parameters, *model.buffers())}
    names = {name: each for name, each in model.state_dict(keep_vars=True).items() if id(each) in ours}
    state = share(training, run, Committed())
    content = copy_of("run", state, run, {"optimizer": "AdamW"}, training.tensors.all, names)
    path, _ = write(tmp_path, content, None)
    wanted = uninterrupted()
    for found, extra in pool.play(2, cases.load_and_train, stage, str(path), True):
        assert extra == {}
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_a_checkpoint_of_a_run_that_merges_is_refused_on_all_ranks(pool: Ranks, tmp_path: Path) -> None:
    """Whatever its number of fragments: its optimizer is the outer one."""
    model, run = cases.Odd(), StateName(4, bytes(32), 4)
    _, _, optimizer = cases.alone(4, "adamw", steps=4, model=model)
    training, names = TrainingState(optimizer), model.state_dict(keep_vars=True)
    settings = {"optimizer": "AdamW", "outer optimizer": "AdamW"}
    content = copy_of("run", share(training, run, Committed()), run, settings, training.tensors.all, names)
    path, _ = write(tmp_path, content, None)
    for failed in pool.outcomes(2, cases.load_and_train, 2, str(path)):
        assert isinstance(failed, Failed)
        assert failed.kind == "ConfigError"
        assert "has the anchors of merges" in failed.message


@pytest.mark.parametrize("content", ["a tensor", "another model", "other groups"])
def test_a_file_that_is_no_such_checkpoint(pool: Ranks, tmp_path: Path, content: str) -> None:
    """Refused on all ranks."""
    path = tmp_path / "plain.pt"
    model = cases.Odd() if content == "other groups" else torch.nn.Linear(3, 3)
    plain = torch.optim.AdamW(model.parameters())
    whole = {"model": model.state_dict(), "optimizer": plain.state_dict()}
    torch.save(torch.ones(3) if content == "a tensor" else whole, path)
    for failed in pool.outcomes(2, cases.load_and_train, 2, str(path)):
        assert isinstance(failed, Failed)
        assert failed.kind == "ConfigError"
        assert ("no whole checkpoint" if content == "a tensor" else "has other groups") in failed.message


def test_bfloat16_is_saved_wide(pool: Ranks, tmp_path: Path) -> None:
    """The float32 copies are what goes on, in another stage too."""
    path = tmp_path / "narrow"
    pool.play(2, cases.save_narrow, 2, str(path))
    weights = shoal.zero.consolidate(path)["model"]
    assert weights["layers.0.1.weight"].dtype == torch.float32
    for stage in (1, 3):
        for found in pool.play(2, cases.load_narrow, stage, str(path)):
            assert torch.equal(found, weights["layers.0.1.weight"])


@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_parameters_are_saved_wide(pool: Ranks, tmp_path: Path, stage: int) -> None:
    """Whatever they are computed in; and loaded so, into a model that is saved once more."""
    first, second = tmp_path / "first", tmp_path / "second"
    pool.play(2, cases.save_narrow, stage, str(first))
    pool.play(2, cases.load_and_save_narrow, stage, str(first), str(second))
    for path in (first, second):
        assert torch.equal(shoal.zero.consolidate(path)["model"]["frozen.weight"], cases.Odd().frozen.weight)


def test_a_process_may_have_another_rank_than_in_its_last_group(pool: Ranks, tmp_path: Path) -> None:
    """Torch remembers how it has cut a tensor, and cuts it so again."""
    path = tmp_path / "narrow"
    pool.play(2, cases.save_narrow, 2, str(path))
    before = pool.play(2, cases.load_narrow, 3, str(path))
    pool.reverse()
    assert all(torch.equal(*each) for each in zip(before, pool.play(2, cases.load_narrow, 3, str(path)), strict=True))


DAMAGES = [
    *("truncated", "a file gone", "no index", "rubbish", "a file gone from the index", "a later format"),
    *("flipped values", "flipped names", "flipped checksums", "flipped index"),
    *("a flipped statistic", "a flipped seal", "no end"),
]


def damaged(path: Path, saved: Path, how: str) -> str:
    """A checkpoint with something wrong; returns what `load` must say."""
    shutil.copytree(saved, path)
    index = json.loads((path / "checkpoint.json").read_text())
    file = path / sorted(index["files"])[1]
    if how == "truncated":
        file.write_bytes(file.read_bytes()[:-5])
        return "is damaged"
    if how == "a file gone":
        file.unlink()
        return "no whole checkpoint"
    if how == "no index":
        (path / "checkpoint.json").unlink()
        return "no whole checkpoint"
    if how.startswith("a flipped"):  # in a name: what it names looked as if it had never been there
        what, file = (b"|state|", file) if how == "a flipped statistic" else (b'digest"', path / "checkpoint.json")
        data = bytearray(file.read_bytes())
        data[data.rindex(what) - (how == "a flipped statistic")] ^= 1
        file.write_bytes(data)
        return "is damaged"
    if how.startswith("flipped"):  # in the values, at the end; or in the names, at the beginning
        place = {"flipped values": -20, "flipped names": 300, "flipped checksums": 60}.get(how)
        file = path / "checkpoint.json" if place is None else file
        data = bytearray(file.read_bytes())
        place = data.index(b'"lr": ') + 6 if place is None else place
        data[place] ^= 1
        file.write_bytes(data)
        return "is damaged"
    if how == "no end":
        (path / "checkpoint.json").write_text("[" * 200_000)
        return "is damaged"
    if how == "rubbish":
        file.write_bytes(b"\xff" * file.stat().st_size)
        return "is damaged"
    index.pop("digest")
    if how == "a file gone from the index":
        index["files"].pop(file.name)
        (path / "checkpoint.json").write_text(seal(index))
        return "lacks the values"
    index["format"] = FORMAT + 1
    (path / "checkpoint.json").write_text(seal(index))
    return "of a later version"


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_changes_nothing(pool: Ranks, saved: Path, tmp_path: Path, how: str) -> None:
    """Every rank says so, whichever of them needed what is missing. Flipped bytes were loaded as good ones."""
    message = damaged(tmp_path / "copy", saved, how)
    for said, same in pool.play(3, cases.load_damaged, str(tmp_path / "copy")):
        assert message in said
        assert same


@pytest.mark.parametrize("where", ["header", "checkpoint.json"])
def test_a_flipped_bit_in_a_name_loses_statistics(saved: Path, tmp_path: Path, where: str) -> None:
    """The momentum under the name was gone without a word. Such a bit is found, wherever it is, or changes nothing."""
    path = shutil.copytree(saved, tmp_path / "copy")
    wanted = repr(shoal.zero.consolidate(saved))
    file = path / "checkpoint.json" if where == "checkpoint.json" else min(path.glob("*.safetensors"))
    data, chance = file.read_bytes(), random.Random(1)
    end = len(data) if where == "checkpoint.json" else 8 + int.from_bytes(data[:8], "little")
    for place in chance.sample(range(end), 40):
        flipped = bytearray(data)
        flipped[place] ^= 1 << chance.randrange(8)
        file.write_bytes(flipped)
        try:
            found = repr(shoal.zero.consolidate(path))
        except ConfigError:
            continue
        assert found == wanted, data[max(0, place - 20) : place + 20]


@pytest.mark.parametrize("weights_alone", [False, True])
def test_one_file_with_flipped_bytes_is_loaded(pool: Ranks, saved: Path, tmp_path: Path, weights_alone: bool) -> None:
    """`torch.load` does not look at the checksums that `torch.save` writes: other weights were taken over."""
    whole, path = shoal.zero.consolidate(saved), tmp_path / "whole.pt"
    torch.save(whole["model"] if weights_alone else whole, path)
    values = whole["model"]["layers.0.1.weight"].numpy().tobytes()
    data = bytearray(path.read_bytes())
    data[data.index(values)] ^= 1
    path.write_bytes(data)
    for said, same in pool.play(2, cases.load_damaged, str(path)):
        assert "is damaged" in said
        assert same


def test_one_file_with_statistics_of_no_parameter_is_loaded(pool: Ranks, saved: Path, tmp_path: Path) -> None:
    """They were left out without a word: it may be of another model."""
    whole, path = shoal.zero.consolidate(saved), tmp_path / "whole.pt"
    whole["optimizer"]["state"][99] = whole["optimizer"]["state"][0]
    torch.save(whole, path)
    for said, same in pool.play(2, cases.load_damaged, str(path)):
        assert "statistics of parameter 99, which is in none of its groups" in said
        assert same


OTHERS: dict[str, tuple[Any, str]] = {
    "model": (cases.load_into_other_model, "of another model: it has layers.1.1.bias"),
    "groups": (cases.load_into_other_groups, "other parameter groups"),
    "optimizer": (cases.load_into_other_optimizer, "of the optimizer AdamW, and this is SGD"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_it_is_not_a_checkpoint_of(pool: Ranks, saved: Path, name: str) -> None:
    """Another model, other groups, another optimizer: named."""
    function, message = OTHERS[name]
    for failed in pool.outcomes(2, function, str(saved)):
        assert isinstance(failed, Failed)
        assert failed.kind == "ConfigError"
        assert message in failed.message


def test_nothing_is_overwritten(pool: Ranks, saved: Path) -> None:
    """A path that exists is refused on all ranks, and left alone."""
    before = sorted((each.name, each.stat().st_mtime_ns) for each in saved.iterdir())
    for failed in pool.outcomes(2, cases.train_and_save, 1, str(saved)):
        assert isinstance(failed, Failed)
        assert "exists already" in failed.message
    assert sorted((each.name, each.stat().st_mtime_ns) for each in saved.iterdir()) == before
    assert [each.name for each in saved.parent.iterdir()] == [saved.name]


def test_a_path_that_is_none_on_one_rank_leaves_the_others_waiting(pool: Ranks, tmp_path: Path) -> None:
    """That rank raised before the ranks agreed: the others took its next call for its answer."""
    for said in pool.play(2, cases.one_rank_gives_no_path, str(tmp_path)):
        assert len(said) == 10
        for bad, kind, message in said:
            assert kind == "ConfigError"
            assert f"path must be a path, a text that is not empty, got {bad}" in message


@pytest.mark.parametrize("path", [None, "", "\0", 5])
def test_what_is_no_path_is_refused(path: Any) -> None:
    """It says so; no error of Python's comes out."""
    with pytest.raises(ConfigError, match="path must be a path"):
        shoal.zero.consolidate(path)


@pytest.mark.parametrize(("killed", "where"), [(1, "file"), (0, "index"), (0, "name")])
def test_a_rank_that_is_killed_while_it_saves_leaves_no_checkpoint(
    pool: Ranks, tmp_path: Path, killed: int, where: str
) -> None:
    """The one from before stays whole; under the new name there is nothing."""
    outcomes = pool.outcomes(3, cases.save_twice_and_die, str(tmp_path), where, killed=killed)
    for rank in {0, 1, 2} - {killed}:
        failed = outcomes[rank]
        assert isinstance(failed, Failed), failed
        assert failed.kind == "RankLost"
    assert [each.name for each in tmp_path.iterdir()] == ["first"]
    assert shoal.zero.consolidate(tmp_path / "first")["extra"] == {"epoch": 1}


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    """Says so."""
    with pytest.raises(ConfigError, match="no whole checkpoint"):
        shoal.zero.consolidate(tmp_path / "nothing")
