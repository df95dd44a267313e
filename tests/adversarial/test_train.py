"""Training on real images, small enough for a CPU: scikit-learn's digits."""

import dataclasses
import json
import re
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bilevax._cli.main import main
from bilevax.adversarial import AbstractNetwork, Settings, load_images, load_network
from bilevax.adversarial.data.images import split
from bilevax.adversarial.networks.layers import Linear, Normalise
from bilevax.adversarial.networks.start import drawn
from bilevax.adversarial.training.run_folder import settings_of
from bilevax.adversarial.training.settings import METHODS
from bilevax.adversarial.training.training import initial_model, score, train
from bilevax.adversarial.training.watch import collapsed

pytestmark = pytest.mark.optimised

SETTINGS = Settings(
    model="small",
    epsilon=0.15,
    epochs=15,
    batch_size=50,
    rate=0.2,
    padding=0,
    flip=False,
    average=0.9,
)
REPOSITORY = Path(__file__).parent.parent.parent
ROBUST = tuple(method for method in METHODS if method != "clean")


@pytest.fixture(scope="module")
def images():
    digits = load_images("digits")
    return dataclasses.replace(
        digits, x_train=digits.x_train[:500], y_train=digits.y_train[:500]
    )


def robust_accuracy(model, images):
    found = score(model, images, SETTINGS, restarts=1, pgd_steps=20, ensemble=False)
    return found["pgd"]


@pytest.fixture(scope="module")
def baselines(images):
    untrained = initial_model(images, SETTINGS)
    clean = train(images, dataclasses.replace(SETTINGS, method="clean"))
    assert clean.rows[-1]["clean"] > 0.9
    return [robust_accuracy(model, images) for model in (untrained, clean.model)]


@pytest.mark.parametrize("method", ROBUST)
def test_training_against_attacks_withstands_them(method, images, baselines):
    trained = train(images, dataclasses.replace(SETTINGS, method=method))
    assert not trained.collapsed
    assert len(trained.rows) == SETTINGS.epochs
    assert trained.rows[-1]["loss"] < trained.rows[0]["loss"]
    for model in (trained.model, trained.average):
        assert robust_accuracy(model, images) > max(baselines) + 0.1


def same(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


def test_an_interrupted_training_ends_as_if_it_had_not_been(images, tmp_path):
    settings = dataclasses.replace(SETTINGS, epochs=4)
    whole = train(images, settings, folder=tmp_path / "whole")

    def interrupt(epoch, model, average, row):
        if epoch == 3:
            raise KeyboardInterrupt

    folder = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        train(images, settings, folder=folder, every_epoch=interrupt)
    again = train(images, settings, folder=folder)
    assert same((whole.model, whole.average), (again.model, again.average))
    timeless = lambda rows: [
        {k: v for k, v in row.items() if k not in ("seconds", "images_per_second")}
        for row in rows
    ]
    assert timeless(again.rows) == timeless(whole.rows)
    lines = (folder / "epochs.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2, 3, 4]
    # A finished run is found again, not run again.
    found = train(images, settings, folder=folder)
    assert same((whole.model, whole.average), (found.model, found.average))
    # Other settings are another run, and the checkpoint is not its own.
    for change in (dict(seed=1), dict(rate=0.1), dict(schedule="cosine")):
        with pytest.raises(ValueError, match=f"its {next(iter(change))} is"):
            train(images, dataclasses.replace(settings, **change), folder=folder)


def test_a_collapse_ends_the_run_and_stays_ended(images, tmp_path):
    settings = dataclasses.replace(SETTINGS, method="bilevel-sgd", epsilon=0.4)
    sound = train(images, settings)
    assert not sound.collapsed
    assert len(sound.rows) == SETTINGS.epochs

    tied = dataclasses.replace(settings, tied=True)
    ended = train(images, tied, folder=tmp_path)
    assert ended.collapsed
    assert "collapsed" in ended.stopped
    assert "A validation keeps the weights of the best epoch" in ended.stopped
    assert len(ended.rows) < SETTINGS.epochs
    # Robust accuracy is gone, though the training attack does not show it.
    assert ended.rows[-1]["accuracy"] > 0.3
    found = score(ended.model, images, tied, restarts=1, pgd_steps=20, ensemble=False)
    assert found["pgd"] < 0.1
    # The same call finds the end; it does not go on behind the guard.
    again = train(images, tied, folder=tmp_path)
    assert again.collapsed
    assert again.rows == ended.rows
    assert same((ended.model, ended.average), (again.model, again.average))


def test_one_long_step_is_misled_at_a_large_radius_where_the_default_is_not(images):
    settings = dataclasses.replace(
        SETTINGS, method="bilevel-sgd", epsilon=0.3, width=64, epochs=80
    )
    long = train(
        images, dataclasses.replace(settings, attack_steps=0, attack_step=2000 / 255)
    )
    assert long.collapsed
    last = long.rows[-1]
    assert last["accuracy"] > 4 * last["robust_by_batch"]

    # The same schedule for as many epochs.
    rows = []

    def enough(epoch, model, average, row):
        rows.append(row)
        if epoch == len(long.rows):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(images, settings, every_epoch=enough)
    assert not any(collapsed(row) for row in rows)
    assert rows[-1]["robust_by_batch"] > last["robust_by_batch"]
    assert rows[-1]["accuracy"] < rows[-1]["robust_by_batch"] + 0.1


def test_the_average_of_the_best_epoch_is_kept(images, tmp_path):
    # Without the usual end of the rate, accuracy goes up and down.
    settings = dataclasses.replace(
        SETTINGS, method="fast-at", epochs=5, rate=0.5, schedule="constant",
        average=0.5, validation=150,
    )  # fmt: skip
    averages = []

    def remember(epoch, model, average, row):
        averages.append(average)

    whole = train(images, settings, every_epoch=remember)
    by_epoch = [row["validation"] for row in whole.rows]
    assert len(set(by_epoch)) > 1
    best = int(np.argmax(by_epoch))
    assert whole.best_epoch == best + 1
    assert same(whole.best, averages[best])
    # The accuracy is that on the last images for training, under PGD.
    kept = split(images, 150)
    for average, accuracy in zip(averages, by_epoch, strict=True):
        found = score(average, kept, settings, restarts=1, pgd_steps=10, ensemble=False)
        assert found["images"] == 150
        assert abs(found["pgd"] - accuracy) < 0.05

    def interrupt(epoch, model, average, row):
        if epoch == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(images, settings, folder=tmp_path, every_epoch=interrupt)
    # The best so far is there, though the run has not ended.
    so_far = averages[int(np.argmax(by_epoch[:4]))]
    assert same(load_network(tmp_path, "best"), so_far)
    again = train(images, settings, folder=tmp_path)
    assert again.best_epoch == whole.best_epoch
    assert same((again.best, again.model), (whole.best, whole.model))
    assert same(load_network(tmp_path, "best"), whole.best)


def test_without_a_validation_there_is_no_best_epoch(images, tmp_path):
    trained = train(images, dataclasses.replace(SETTINGS, epochs=1), folder=tmp_path)
    assert trained.best is None
    assert trained.best_epoch is None
    with pytest.raises(
        ValueError, match=r"best\.npz does not exist.*with a validation"
    ):
        load_network(tmp_path, "best")
    with pytest.raises(ValueError, match="between 1 and 499"):
        train(images, dataclasses.replace(SETTINGS, validation=500))


def test_a_batch_larger_than_the_data_is_a_mistake(images):
    with pytest.raises(ValueError, match="more than the 500 training images"):
        train(images, dataclasses.replace(SETTINGS, batch_size=501))


def test_the_command_trains_scores_and_draws(tmp_path, capsys):
    command = [
        "train", "--json", "--dataset", "digits", "--model", "small", "--epsilon",
        "1/8", "--epochs", "2", "--batch-size", "100", "--padding", "0", "--no-flip",
        "--held-out", "300", "--validation", "200", "--restarts", "1", "--no-ensemble",
        "--out", str(tmp_path),
    ]  # fmt: skip
    assert main(command) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["epsilon"] == 0.125
    assert result["reading"] == "added"
    assert result["averaged"]["images"] == 300
    assert 0 <= result["raw"]["pgd"] <= result["raw"]["clean"] <= 1
    assert result["best_epoch"] in (1, 2)
    assert result["best"]["images"] == 300
    assert (tmp_path / "curves.svg").stat().st_size > 1000
    assert json.loads((tmp_path / "result.json").read_text()) == result

    # For people: a line per epoch where there is no terminal for a bar.
    command.remove("--json")
    assert main([*command[:-1], str(tmp_path / "again")]) == 0
    shown = capsys.readouterr()
    assert shown.err.count("of 2: loss") == 2
    assert "averaged: clean" in shown.out
    assert "    best: clean" in shown.out


def test_a_trained_network_is_found_again_scored_and_trained_further(
    images, tmp_path, capsys
):
    settings = dataclasses.replace(SETTINGS, epochs=2)
    trained = train(images, settings, folder=tmp_path / "first")
    assert same(trained.average, load_network(tmp_path / "first"))
    assert same(trained.model, load_network(tmp_path / "first", "last"))
    assert settings_of(tmp_path / "first").as_row() == settings.as_row()

    # The command scores the weights as the library does.
    scoring = ["--dataset", "digits", "--restarts", "1", "--no-ensemble"]
    command = ["evaluate", str(tmp_path / "first"), *scoring]
    assert main([*command, "--json", "--epsilon", "1/10"]) == 0
    found = json.loads(capsys.readouterr().out)
    same_radius = dataclasses.replace(settings, epsilon=0.1)
    expected = score(trained.average, images, same_radius, restarts=1, ensemble=False)
    assert (found["clean"], found["pgd"]) == (expected["clean"], expected["pgd"])
    assert main([*command, "--weights", "last"]) == 0
    assert "297 test images" in capsys.readouterr().out

    # Where a run starts is part of what it is.
    further = train(images, settings, folder=tmp_path / "second", network=trained.model)
    assert further.rows[0]["loss"] < trained.rows[0]["loss"]
    with pytest.raises(ValueError, match="its start is"):
        train(images, settings, folder=tmp_path / "second")
    with pytest.raises(ValueError, match="does not exist: name the folder of a run"):
        load_network(tmp_path)
    with pytest.raises(ValueError, match="`kind` is one of average, last, best"):
        load_network(tmp_path / "first", "first")


class Flat(AbstractNetwork):
    """A network of the user's own: a linear map of pooled pixels and their squares."""

    normalise: Normalise
    head: Linear
    classes: int = eqx.field(static=True)

    def features(self, x, training):
        return jnp.concatenate([x, x**2], axis=-1), ()


def test_a_network_of_your_own_is_trained_and_found_again(images, tmp_path):
    head = drawn(Linear(2, 10, dtype="float32"), jax.random.key(0))
    mine = Flat(Normalise(images.mean, images.std, 1), head, 10)
    settings = dataclasses.replace(SETTINGS, epochs=2)
    trained = train(images, settings, folder=tmp_path, network=mine)
    assert not same(trained.model, mine)
    assert same(trained.average, load_network(tmp_path, like=mine))
    with pytest.raises(ValueError, match="mark them as static"):
        train(images, settings, network=eqx.tree_at(lambda m: m.head, mine, len))
    # The file alone would build the network that the settings name.
    with pytest.raises(ValueError, match="other shapes"):
        load_network(tmp_path)


def test_a_run_that_diverges_fails_and_stays_failed(images, tmp_path, capsys):
    command = [
        "train", "--dataset", "digits", "--model", "small", "--width", "4", "--method",
        "at", "--rate", "1e4", "--epochs", "9", "--batch-size", "100", "--padding", "0",
        "--no-flip", "--restarts", "1", "--no-ensemble", "--out", str(tmp_path),
    ]  # fmt: skip
    rows = []
    for _ in range(2):
        assert main(command) == 1
        assert "diverged" in capsys.readouterr().out
        lines = (tmp_path / "epochs.jsonl").read_text().splitlines()
        rows.append([json.loads(line, parse_constant=pytest.fail) for line in lines])
    assert rows[0] == rows[1]
    assert len(rows[0]) < 9


@pytest.mark.parametrize("method", ["clean", "bilevel-sgd"])
def test_statistics_that_lag_behind_are_no_collapse(method, images):
    settings = dataclasses.replace(
        SETTINGS, method=method, epsilon=0.01, batch_size=500, rate=1.0, epochs=12
    )
    trained = train(images, settings)
    assert not trained.failed
    assert len(trained.rows) == 12


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("epochs.jsonl", "", "epochs.jsonl has 0 rows, the checkpoint beside it 1"),
        ("epochs.jsonl", '{"epoch": 1, "lo', "epochs.jsonl: .*start afresh"),
        ("epochs.jsonl", None, "epochs.jsonl: .*start afresh"),
        ("settings.json", "{", "settings.json, which `train` writes, cannot be read"),
    ],
)
def test_damaged_files_of_a_run_are_named(images, tmp_path, file, text, told):
    settings = dataclasses.replace(SETTINGS, epochs=1)
    train(images, settings, folder=tmp_path)
    (tmp_path / file).unlink()
    if text is not None:
        (tmp_path / file).write_text(text)
    with pytest.raises(ValueError, match=told):
        train(images, settings, folder=tmp_path)
    again = train(images, settings, folder=tmp_path, resume=False)
    assert len(again.rows) == 1


def test_mistakes_on_the_command_line_are_told_before_training(capsys, tmp_path):
    usual = ["train", "--dataset", "digits", "--out", str(tmp_path / "never")]
    for wrong, text in (
        (["--restarts", "0"], "--restarts: a whole number from 1 on, not 0"),
        (["--epsilon", "8/0"], "divides by zero"),
        (["--epsilon", "abc"], "is no number; write it as"),
    ):
        with pytest.raises(SystemExit):
            main([*usual, *wrong])
        told = capsys.readouterr().err
        assert text in told
        assert "Try `bilevax train --help`" in told
    for wrong, text in (
        (["--processes", "2", "--process", "0"], "--coordinator"),
        (["--data", str(tmp_path)], "comes with scikit-learn and reads no files"),
        (["--padding", "5"], "`padding` is 5"),
        (["--seed", "3000000000"], "`seed` is between"),
        (["--label-smoothing", "2"], "`label_smoothing` is in"),
    ):
        assert main([*usual, *wrong]) == 1
        assert text in capsys.readouterr().err
    assert not (tmp_path / "never").exists()


def test_the_snippets_of_the_documentation_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = (REPOSITORY / "docs" / "adversarial.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 4
    digits = load_images("digits")
    scope: dict = dict(pixels=digits.x_train / 255.0, y=digits.y_train)
    for block in blocks:
        exec(compile(block, "adversarial.md", "exec"), scope)
    assert scope["logits"].shape == (5, 10)
    assert isinstance(scope["network"], scope["Shallow"])
    assert scope["trained"].rows[-1]["clean"] > 0.2
    np.testing.assert_array_equal(
        load_images("npz", tmp_path / "mine.npz").x_train, digits.x_train[:900]
    )
    assert "all steps taken" in capsys.readouterr().out


def test_missing_data_is_a_sentence(tmp_path, capsys):
    assert main(["train", "--data", str(tmp_path), "--out", str(tmp_path / "o")]) == 1
    assert "cifar" in capsys.readouterr().err.lower()
