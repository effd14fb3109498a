"""The known ways to learn nothing, and how metrics tell of them: a function each, from history to a plain sentence."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median

from slime.observability import history as h
from slime.observability.history import History, Trend
from slime.observability.scores import Score

MAKES_ADVANTAGES = (
    *("custom_reward_post_process_path", "custom_convert_samples_to_train_data_path"),
    *("custom_advantage_function_path", "rollout_data_postprocess_path"),
)
"""Options by which a user's function may make advantages of equal rewards."""
RECENT, FEWEST = 8, 3
"""How many last rollouts rules look at, and how many there must be."""
SIGMAS = 3.0
"""How many standard errors are no chance: a run is looked at after every rollout, not once."""


@dataclass(frozen=True)
class Facts:
    """What rules need to know of a run's options."""

    rewards_teach: bool = True
    """Advantages come of rewards alone: no user's function makes them."""
    compares: bool = True
    """They come of comparison within groups."""
    asynchronous: bool = False
    mismatch: float = 0.1
    """Nats, in the mean, that trainer and engine may be apart."""
    push_interval: int = 1
    """Rollouts."""
    filters: bool = False
    """A dynamic sampling filter drops groups: rewards are those of the others alone."""

    @property
    def reward(self) -> str:
        """What the reward of a rollout is called."""
        return "reward of the kept groups" if self.filters else "reward"

    @classmethod
    def of(cls, args: argparse.Namespace) -> Facts:
        """Of a run's options; those that are not there are as they are by default."""
        given = vars(args)
        mine = any(given.get(name) is not None for name in MAKES_ADVANTAGES)
        return cls(
            rewards_teach=given.get("loss_type", "policy_loss") == "policy_loss" and not mine,
            compares=given.get("reward_baseline", "mean") is not None,
            asynchronous=bool(given.get("asynchronous")),
            mismatch=given.get("mismatch_threshold") or 0.1,
            push_interval=given.get("update_weights_interval") or 1,
            filters=given.get("dynamic_sampling_filter_path") is not None,
        )


@dataclass(frozen=True)
class Sentence:
    """What is said, with its figures, and the metrics that they are of."""

    text: str
    keys: tuple[str, ...]


Find = Callable[[History, Facts], Sentence | None]


def improves(history: History) -> bool:
    """Whether the reward rises, or has risen, by more than its noise."""
    return _rises(history.trend(h.REWARD))


def mask_is_empty(history: History, facts: Facts) -> Sentence | None:
    """No token is trained."""
    tokens = history.column(h.TRAINED_TOKENS, RECENT)
    empty = sum(value == 0 for value in tokens)
    if len(tokens) < FEWEST or 2 * empty < len(tokens) or _bad_steps(history):
        return None
    return Sentence(
        f"In {empty} of the last {len(tokens)} rollouts no token was in the loss: every loss_mask was 0, or "
        "remove_sample was set. Look at what your generate or conversion function, or --loss-mask-type, leaves in it.",
        (h.TRAINED_TOKENS,),
    )


def steps_are_left_out(history: History, facts: Facts) -> Sentence | None:
    """Loss or gradients are not finite."""
    bad, count = _bad_steps(history), len(list(history.rollouts)[-RECENT:])
    if count < FEWEST or 2 * bad < count:
        return None
    return Sentence(
        f"The optimizer took no step in {bad} of the last {count} rollouts, as loss or gradients were not finite, or "
        "far too large: lower --lr, and look at events.jsonl.",
        h.BAD,
    )


def rate_is_zero(history: History, facts: Facts) -> Sentence | None:
    """The learning rate is 0, beyond the first steps of a warm-up."""
    rates = history.column(h.RATE, RECENT)
    if len(rates) < FEWEST or any(rates[-FEWEST:]):
        return None
    zeros = next((i for i, rate in enumerate(reversed(rates)) if rate), len(rates))
    return Sentence(
        f"The learning rate was 0 in the last {zeros} rollouts: no weight changes. Look at --lr, and whether the "
        "schedule has ended (--lr-decay-iters, --min-lr).",
        (h.RATE,),
    )


def rewards_are_zero(history: History, facts: Facts) -> Sentence | None:
    """Every response has the lowest reward, though it was not cut off: labels or the rule do not fit."""
    reward, cut = _only_reward(history, facts), _mean(history, h.TRUNCATED)
    if reward is None or reward > 0 or cut >= 0.5:
        return None
    return Sentence(
        f"All responses of the last {_recent(history)} rollouts had reward {reward:g}, though {1 - cut:.0%} of them "
        "ended by themselves: labels or the reward do not fit the answers, or the task is far too hard. Read one with "
        "its label (tools/view_samples.py); check --label-key and --rm-type.",
        (h.REWARD, h.TRUNCATED),
    )


def responses_are_cut(history: History, facts: Facts) -> Sentence | None:
    """Responses are cut off before their answer, and get one reward for that."""
    cut, varied = _mean(history, h.TRUNCATED), history.column(h.VARIED, RECENT)
    if len(varied) < FEWEST or cut < 0.5 or fmean(varied) >= 0.5 or _is_taught(history) or improves(history):
        return None
    return Sentence(
        f"{cut:.0%} of the responses of the last {len(varied)} rollouts were cut off at their limit, and only "
        f"{fmean(varied):.0%} of groups had rewards that differ: answers may come too late. Raise "
        "--rollout-max-response-len, or have the prompt ask for less.",
        (h.TRUNCATED, h.VARIED, h.REWARD),
    )


def rewards_are_constant(history: History, facts: Facts) -> Sentence | None:
    """Every response has one and the same reward above 0: of format alone, or of a solved task."""
    reward = _only_reward(history, facts)
    if reward is None or reward <= 0:
        return None
    return Sentence(
        f"All responses of the last {_recent(history)} rollouts had reward {reward:g}: advantages are 0. If that is "
        "the most there is, the prompts are solved, and harder ones are needed; if not, the reward does not look at "
        "the answer (format alone, or a constant): check --rm-type or --custom-rm-path.",
        (h.REWARD, h.VARIED),
    )


def groups_are_equal(history: History, facts: Facts) -> Sentence | None:
    """Rewards are equal within every group, not between them."""
    if not facts.compares or not _all_equal(history, facts) or _only_reward(history, facts) is not None:
        return None
    mean = _mean(history, h.REWARD)
    return Sentence(
        f"In every group of the last {_recent(history)} rollouts all responses had the same reward ({mean:.3g} in the "
        "mean of all): advantages are 0. Take prompts that are neither too hard nor too easy, more samples a prompt or "
        "a higher --rollout-temperature, or --dynamic-sampling-filter-path; check that the reward looks at the answer.",
        (h.VARIED, h.REWARD),
    )


def engines_are_behind(history: History, facts: Facts) -> Sentence | None:
    """Engines do not generate with the trainer's weights."""
    since = max(RECENT, 2 * facts.push_interval)
    rows = list(history.rollouts.values())[-since - 1 : -1]  # the present one's push is still to come
    trained = [row for row in rows if h.ENGINES in row and row.get(h.TRAINED_TOKENS)]
    if len(trained) == since and not any(h.PUSH in row for row in rows):
        return Sentence(
            f"No weights were pushed to the engines in the last {since} rollouts: they generate with old ones.",
            (h.PUSH, h.ENGINES),
        )
    probe = history.column(h.PROBE, FEWEST)
    if len(probe) == FEWEST and min(probe) > facts.mismatch:
        return Sentence(
            f"After each of the last {FEWEST} pushes trainer and engine differed by {median(probe):.3g} nats in the "
            f"log-probs of one prompt (--mismatch-threshold {facts.mismatch:g}): the weights do not arrive as they "
            "are. Try --check-weight-update-equal.",
            (h.PROBE,),
        )
    apart = history.column(h.MISMATCH)
    if facts.asynchronous or len(apart) < 2 * FEWEST:
        return None
    first, now = fmean(apart[:FEWEST]), fmean(apart[-FEWEST:])
    if now <= max(facts.mismatch, 4 * first):
        return None
    return Sentence(
        f"Trainer and engine differ by {now:.3g} nats in the log-probs of the same tokens, and by {first:.3g} at first:"
        " the engines do not have the trainer's weights, or compute apart from it. Try --check-weight-update-equal.",
        (h.MISMATCH,),
    )


def gradient_is_zero(history: History, facts: Facts) -> Sentence | None:
    """No gradient, whatever the rewards."""
    norms = history.column(h.GRAD_NORM, RECENT)
    if len(norms) < FEWEST or any(norms):
        return None
    return Sentence(
        f"The gradient was exactly 0 in the last {len(norms)} rollouts: all advantages or masks are 0, or no parameter "
        "is trained.",
        (h.GRAD_NORM,),
    )


def reward_is_not_the_score(history: History, facts: Facts) -> Sentence | None:
    """The reward rises, and evaluations do not: it pays for format, length or a trick."""
    scores, versions = _scores(history), sorted(history.evaluations)
    if not scores or any(_latest(values) > values[0].value for values in scores.values()):
        return None
    trend = history.trend(h.REWARD, within=(versions[0], versions[-1]))
    if trend is None or trend.count < RECENT or not _rises(trend):
        return None
    rise = trend.now - trend.first
    stuck = {key: values for key, values in scores.items() if _would_have_risen(values, rise) or _falls(values)}
    if not stuck:
        return None
    told = ", ".join(f"{key} went from {all_[0].value:.3f} to {all_[-1].value:.3f}" for key, all_ in stuck.items())
    return Sentence(
        f"The {facts.reward} rose from {trend.first:.3f} to {trend.now:.3f}, but {told}: the reward pays for something "
        "that evaluations do not, such as format alone. Read samples of high reward, and compare both rewards.",
        (h.REWARD, *stuck),
    )


def scores_fall(history: History, facts: Facts) -> Sentence | None:
    """Evaluations are worse than they were, by more than chance."""
    fallen = {key: values for key, values in _scores(history).items() if _falls(values)}
    if not fallen:
        return None
    told = ", ".join(
        f"{key} fell from {_best(values).value:.3f} to {values[-1].value:.3f} ({values[-1].prompts:.0f} prompts)"
        for key, values in fallen.items()
    )
    older = ", and lower --max-weight-staleness" if facts.asynchronous else ""
    return Sentence(
        f"{told}, by more than chance: the weights are worse there than they were. Lower --lr; see whether they arrive "
        f"in the engines ({h.PROBE}); correct for what engines compute apart ({h.MISMATCH}) by --use-tis{older}.",
        (*fallen, h.PROBE, h.MISMATCH),
    )


def few_groups_vary(history: History, facts: Facts) -> Sentence | None:
    """Most groups teach nothing."""
    varied = history.column(h.VARIED, RECENT)
    if len(varied) < RECENT or not 0 < fmean(varied) < 0.1 or not facts.rewards_teach or _is_taught(history):
        return None
    return Sentence(
        f"Only {fmean(varied):.1%} of groups had rewards that differ, and the others teach nothing: "
        "--dynamic-sampling-filter-path leaves them out, more samples a prompt make them fewer.",
        (h.VARIED,),
    )


def steps_are_clipped(history: History, facts: Facts) -> Sentence | None:
    """Steps go further than the clip lets them."""
    clipped = history.column(h.CLIPPED, RECENT)
    if len(clipped) < RECENT or fmean(clipped) <= 0.5:
        return None
    return Sentence(
        f"{fmean(clipped):.0%} of tokens were clipped: a rollout's steps go too far. Lower --lr, or take fewer steps a "
        "rollout (--num-steps-per-rollout).",
        (h.CLIPPED,),
    )


def policy_has_left(history: History, facts: Facts) -> Sentence | None:
    """Far from the reference, or from step to step, for nothing."""
    for key, what, advice in (
        (h.KL, "from the reference", "Raise --kl-loss-coef or lower --lr"),
        (h.STEP_KL, "from the policy that generated", "Lower --lr"),
    ):
        found = history.column(key, RECENT)
        if len(found) == RECENT and abs(fmean(found)) > 1 and not improves(history):
            far = f"{abs(fmean(found)):.2g} nats a token {what}"
            text = f"The policy is {far}, and the {facts.reward} does not rise. {advice}."
            return Sentence(text, (key, h.REWARD))
    return None


def entropy_is_gone(history: History, facts: Facts) -> Sentence | None:
    """Responses are all the same, before they are good."""
    entropy = history.column(h.ENTROPY)
    if len(entropy) < RECENT or improves(history) or h.REWARD not in history.rollouts[max(history.rollouts)]:
        return None
    first, now = fmean(entropy[:FEWEST]), fmean(entropy[-FEWEST:])
    if first <= 0 or now > 0.05 * first or _is_taught(history):
        return None
    return Sentence(
        f"Entropy fell from {first:.3g} to {now:.3g} nats, and the {facts.reward} does not rise: responses are all "
        "alike. Lower --lr, or raise --entropy-coef or --rollout-temperature.",
        (h.ENTROPY, h.REWARD),
    )


def gradient_grows(history: History, facts: Facts) -> Sentence | None:
    """Gradients are of another size than at first."""
    norms = history.column(h.GRAD_NORM)
    if len(norms) < 2 * RECENT:
        return None
    first, now = median(norms[:RECENT]), median(norms[-RECENT:])
    if first <= 0 or now < 50 * first or improves(history):
        return None
    return Sentence(
        f"The gradient's norm grew from {first:.3g} to {now:.3g}, and the {facts.reward} does not rise: "
        "lower --lr or --clip-grad.",
        (h.GRAD_NORM, h.REWARD),
    )


STOPS: dict[str, Find] = {
    "the loss mask is empty": mask_is_empty,
    "steps are left out": steps_are_left_out,
    "the learning rate is 0": rate_is_zero,
    "all rewards are 0": rewards_are_zero,
    "responses are cut off": responses_are_cut,
    "all rewards are equal": rewards_are_constant,
    "rewards are equal in every group": groups_are_equal,
    "weights do not reach the engines": engines_are_behind,
    "the gradient is 0": gradient_is_zero,
    "the reward is not the score": reward_is_not_the_score,
}
"""What keeps a run from learning, by what the step's line calls it. Causes come before their effects."""
HINTS: tuple[Find, ...] = (
    *(scores_fall, few_groups_vary, steps_are_clipped, policy_has_left, entropy_is_gone, gradient_grows),
)
"""What may keep it from learning well."""


def _recent(history: History) -> int:
    return len(history.column(h.REWARD, RECENT))


def _mean(history: History, key: str) -> float:
    found = history.column(key, RECENT)
    return fmean(found) if found else 0.0


def _bad_steps(history: History) -> int:
    rows = list(history.rollouts.values())[-RECENT:]
    return sum(any(row.get(key, 0.0) > 0 for key in h.BAD) for row in rows)


def _is_taught(history: History) -> bool:
    """By a teacher, whatever the rewards are."""
    return bool(history.column(h.TEACHER, RECENT))


def _all_equal(history: History, facts: Facts) -> bool:
    varied = history.column(h.VARIED, RECENT)
    return facts.rewards_teach and not _is_taught(history) and len(varied) >= FEWEST and not any(varied)


def _only_reward(history: History, facts: Facts) -> float | None:
    """The reward that every response had, if that is one."""
    rewards = history.column(h.REWARD, RECENT)
    same = bool(rewards) and max(rewards) - min(rewards) <= 1e-6 * max(map(abs, rewards))
    return rewards[-1] if same and _all_equal(history, facts) else None


def _rises(trend: Trend | None) -> bool:
    return trend is not None and (trend.beyond_noise(SIGMAS) > 0 or trend.changed(SIGMAS) > 0)


def _scores(history: History) -> dict[str, list[Score]]:
    """Of evaluations of which there is more than one, the scores by version."""
    found: dict[str, list[Score]] = {}
    for _, scores in sorted(history.evaluations.items()):
        for key, score in scores.items():
            found.setdefault(key, []).append(score)
    return {key: scores for key, scores in found.items() if len(scores) > 1}


def _latest(scores: list[Score]) -> float:
    """The better one of the last two after the first."""
    return max(score.value for score in scores[1:][-2:])


def _best(scores: list[Score]) -> Score:
    """Of those before the last one."""
    return max(scores[:-1], key=lambda score: score.value)


def _falls(scores: list[Score]) -> bool:
    """The last one is below the best one before it. That one is also the luckiest, so that of runs of 20 evaluations
    without any change 2% are called falling once, on prompts that stay the same."""
    return _best(scores).is_above(scores[-1], SIGMAS)


def _would_have_risen(scores: list[Score], rise: float) -> bool:
    """Whether a rise like the reward's would be seen: there is as much room above the first score, and both have so
    many prompts that it would be no chance."""
    room = max(score.highest for score in scores) - scores[0].value
    return min(rise, room) > SIGMAS * scores[0].noise(scores[-1])
