"""A key that nothing reads is refused with the nearest one that exists."""

import pytest

from whitenedcse.settings import refuse_unknown, unknown

LOSS = {"_target_": "whitenedcse.training.loss.MultiPositiveLoss", "form": "l1", "temperature": 0.05}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"seeed": 1}, "no setting 'seeed'; the nearest is 'seed'"),
        (
            {"loss": {**LOSS, "temprature": 1}},
            "no setting 'loss.temprature'; the nearest is 'loss.temperature'",
        ),
        (
            {"other": {"loss": {**LOSS, "forms": 1}}},
            "no setting 'other.loss.forms'; the nearest is 'other.loss.form'",
        ),
    ],
)
def test_a_misspelt_key_is_named_with_the_nearest(config, message):
    with pytest.raises(ValueError, match=message):
        refuse_unknown(config, ["seed", "loss", "other"])


def test_keys_that_are_read_pass():
    refuse_unknown(
        {"seed": 1, "loss": {**LOSS, "_partial_": True}, "other": {"free": 1}}, ["seed", "loss", "other"]
    )


def test_the_nearest_of_nothing_is_nothing():
    assert unknown("a", []) == "no setting 'a'"


def test_the_rest_of_a_class_s_settings_are_those_of_the_class_above():
    trainer = {"_target_": "whitenedcse.training.trainer.Trainer", "chunk": None, "max_steps": 4}
    refuse_unknown({"trainer": trainer}, ["trainer"])
    with pytest.raises(ValueError, match=r"no setting 'trainer\.settings'"):
        refuse_unknown({"trainer": trainer | {"settings": 1}}, ["trainer"])


def test_settings_of_something_absent_are_refused_with_the_way_to_leave_it_out():
    """As an experiment that sets head.whitening.groups beside head=dense, which has no whitening."""
    head = {"_target_": "whitenedcse.model.head.Head", "whitening": {"groups": 384}}
    message = r'head\.whitening=\{"groups": 384\} must be .* or null; head\.whitening=null leaves it out$'
    with pytest.raises(ValueError, match=message):
        refuse_unknown({"head": head}, ["head"])
    refuse_unknown({"head": head | {"whitening": None}}, ["head"])
    with pytest.raises(ValueError, match="or null$"):
        refuse_unknown({"head": head | {"whitening": 3}}, ["head"])
    with pytest.raises(ValueError, match=r"loss\.form=.* must be text$"):
        refuse_unknown({"loss": {**LOSS, "form": {"a": 1}}}, ["loss"])
