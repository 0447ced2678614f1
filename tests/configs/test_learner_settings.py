import pytest
from pydantic import ValidationError

from configs.learner import LearnerConfig


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"advantage": "gae"}, "advantage=gae without a critic"),
        ({"critic": {}}, "advantage=grpo with a critic"),
        ({"normalise": "constant"}, "expected a number of tokens with normalise=constant"),
        ({"normalise_constant": 100}, "expected a number of tokens with normalise=constant"),
        ({"loss": "cispo", "dual_clip": 3.0}, "dual_clip: got 3.0 with loss=cispo"),
        ({"dual_clip": 0.9}, "greater than 1"),
        ({"tis_mode": "mask", "tis_cap": None}, "tis_mode: got mask with tis_cap=none"),
        ({"tis_floor": 0.5}, "tis_floor: got 0.5 with tis_mode=truncate"),
        ({"tis_mode": "mask", "tis_cap": 0.9}, "no token would be left"),
        ({"tis_mode": "mask", "tis_floor": 3.0}, "not above the cap"),
        ({"reject_mean": 1.0}, "greater than 1"),
        ({"loss": "sequence"}, "'token', 'gspo' or 'cispo'"),
        ({"advantage": "gae", "critic": {"gae_lambda": 1.1}}, "less than or equal to 1"),
        ({"advantage": "gae", "critic": {"shared": True, "minibatches": 2}}, "got 1 and 2 with shared=true"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(settings, fault):
    with pytest.raises(ValidationError, match=fault):
        LearnerConfig(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"advantage": "gae", "critic": {}},
        {"normalise": "constant", "normalise_constant": 100},
        {"tis_mode": "mask", "tis_floor": 0.2, "tis_cap": 5.0, "loss": "gspo", "dual_clip": 3.0},
    ],
)
def test_settings_that_fit_together_are_taken(settings):
    LearnerConfig(**settings)
