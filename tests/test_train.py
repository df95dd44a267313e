"""Training on real images, small enough for a CPU: scikit-learn's digits."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from bilevax._cli.main import main
from bilevax.adversarial.images import load_images
from bilevax.adversarial.settings import METHODS, Settings
from bilevax.adversarial.training import initial_model, score, train

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
    settings = dataclasses.replace(SETTINGS, method="bilevel-sgd", epsilon=0.3)
    sound = train(images, settings)
    assert not sound.collapsed
    assert len(sound.rows) == SETTINGS.epochs

    tied = dataclasses.replace(settings, tied=True)
    ended = train(images, tied, folder=tmp_path)
    assert ended.collapsed
    assert "collapsed" in ended.stopped
    assert len(ended.rows) < SETTINGS.epochs
    # Robust accuracy is gone, though the training attack does not show it.
    assert ended.rows[-1]["accuracy"] > 0.3
    assert ended.rows[-1]["robust"] < sound.rows[-1]["robust"] / 2
    # The same call finds the end; it does not go on behind the guard.
    again = train(images, tied, folder=tmp_path)
    assert again.collapsed
    assert again.rows == ended.rows
    assert same((ended.model, ended.average), (again.model, again.average))


def test_a_batch_larger_than_the_data_is_a_mistake(images):
    with pytest.raises(ValueError, match="more than the 500 training images"):
        train(images, dataclasses.replace(SETTINGS, batch_size=501))


def test_the_command_trains_scores_and_draws(tmp_path, capsys):
    command = [
        "train", "--json", "--dataset", "digits", "--model", "small", "--epsilon",
        "1/8", "--epochs", "2", "--batch-size", "100", "--padding", "0", "--no-flip",
        "--held-out", "300", "--restarts", "1", "--no-ensemble", "--out", str(tmp_path),
    ]  # fmt: skip
    assert main(command) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["epsilon"] == 0.125
    assert result["reading"] == "added"
    assert result["averaged"]["images"] == 300
    assert 0 <= result["raw"]["pgd"] <= result["raw"]["clean"] <= 1
    assert (tmp_path / "curves.svg").stat().st_size > 1000
    assert json.loads((tmp_path / "result.json").read_text()) == result

    # For people: a line per epoch where there is no terminal for a bar.
    command.remove("--json")
    assert main([*command[:-1], str(tmp_path / "again")]) == 0
    shown = capsys.readouterr()
    assert shown.err.count("of 2: loss") == 2
    assert "averaged: clean" in shown.out


def test_missing_data_is_a_sentence(tmp_path, capsys):
    assert main(["train", "--data", str(tmp_path), "--out", str(tmp_path / "o")]) == 1
    assert "cifar" in capsys.readouterr().err.lower()
