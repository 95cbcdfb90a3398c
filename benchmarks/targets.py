"""What the library is held to: bounds on ratios of seconds, and the verdict on a measured one."""

from __future__ import annotations

from dataclasses import dataclass

from .timing import Spread

__all__ = ["STEP_TARGETS", "TRACKING_BOUND", "TRAINING_BOUND", "Target", "held_to_row", "step_verdicts", "verdict"]


@dataclass(frozen=True)
class Target:
    """A bound on the seconds of one contender ÷ those of another.

    Attributes:
        shape: frames, rows and columns.
        numerator, denominator: contenders.
        bound: what the ratio is held to.
        at_least: the ratio must be at least the bound, else at most.
        aim: what would be better still.
        decisive: a target that settles the shape, whatever others say: multiples of the floor depend on one
            measurement of a peer less.

    Example:
        >>> target = Target((24, 512, 64), "peer", "ours", 3.0, at_least=True, aim=4.0)
        >>> target.text, target.met(3.5), target.met(2.9)
        ('≥ 3', True, False)
    """

    shape: tuple[int, int, int]
    numerator: str
    denominator: str
    bound: float
    at_least: bool
    aim: float | None = None
    decisive: bool = False

    @property
    def text(self) -> str:
        """The bound as it is printed."""
        return f"{'≥' if self.at_least else '≤'} {self.bound:g}"

    def met(self, ratio: float) -> bool:
        """Whether a ratio keeps the bound."""
        return ratio >= self.bound if self.at_least else ratio <= self.bound

    def reaches_aim(self, ratio: float) -> bool:
        """Whether a ratio is also as good as what is aimed at; true only where there is an aim."""
        if self.aim is None:
            return False
        return ratio >= self.aim if self.at_least else ratio <= self.aim


_EUCLIDEAN = {(24, 512, 64): (3, 4), (144, 768, 64): (3, 4), (96, 128, 32): (10, 20), (288, 64, 16): (15, 30)}
_CANONICAL = {(24, 512, 64): 15, (144, 768, 64): 20, (96, 128, 32): 15, (288, 64, 16): 20}
_FLOORS = {(24, 512, 64): (3, 2.2), (144, 768, 64): (3, 2.2)}

STEP_TARGETS = (
    *(Target(s, "geoopt Euclidean", "ours", bound, True, aim) for s, (bound, aim) in _EUCLIDEAN.items()),
    *(Target(s, "geoopt canonical", "ours, canonical", bound, True) for s, bound in _CANONICAL.items()),
    *(Target(s, "ours", "floor", bound, False, aim, decisive=True) for s, (bound, aim) in _FLOORS.items()),
)

# a whole training step under RiemannianAdam ÷ the same model unconstrained under AdamW
TRAINING_BOUND = 1.05

# the share of a training run's time that a record of the tracker every 50 steps may take
TRACKING_BOUND = 0.02


def verdict(target: Target, ratio: Spread | None) -> str:
    """ "met", "met, and the aim", "not met" or "not measured"; medians decide.

    Example:
        >>> verdict(Target((1, 2, 1), "a", "b", 3.0, at_least=True, aim=4.0), Spread(5.0, 4.0, 6.0, 9))
        'met, and the aim'
    """
    if ratio is None:
        return "not measured"
    if not target.met(ratio.median):
        return "not met"
    return "met, and the aim" if target.reaches_aim(ratio.median) else "met"


def step_verdicts(ratios: dict[Target, Spread | None]) -> dict[Target, str]:
    """The verdict on every target. On a shape with a floor target, the floor decides over the peer with our metric.

    Example:
        >>> peer = Target((1, 2, 1), "peer", "ours", 3.0, at_least=True)
        >>> floor = Target((1, 2, 1), "ours", "floor", 3.0, at_least=False, decisive=True)
        >>> list(step_verdicts({peer: Spread(2.5, 2, 3, 9), floor: Spread(2.1, 2, 3, 9)}).values())
        ['not met; the floor decides: met', 'met']
    """
    verdicts = {target: verdict(target, ratio) for target, ratio in ratios.items()}
    result = dict(verdicts)
    for target, said in verdicts.items():
        deciding = [t for t in verdicts if t.decisive and t.shape == target.shape and t.numerator == target.denominator]
        if said == "not met" and not target.decisive and deciding and verdicts[deciding[0]].startswith("met"):
            result[target] = f"not met; the floor decides: {verdicts[deciding[0]]}"
    return result


def held_to_row(target: Target, ratio: Spread | None, said: str) -> tuple[str, ...]:
    """One row of the table of targets: shape, ratio, measured, held to, aim, verdict.

    Example:
        >>> target = Target((24, 512, 64), "ours", "floor", 3.0, at_least=False, aim=2.2)
        >>> held_to_row(target, Spread(2.5, 2.4, 2.6, 9), "met")
        ('24×512×64', 'ours ÷ floor', '2.50 (2.40–2.60)', '≤ 3', '2.2', 'met')
    """
    aim = "" if target.aim is None else f"{target.aim:g}"
    measured = "–" if ratio is None else str(ratio)
    shape = "×".join(map(str, target.shape))
    return (shape, f"{target.numerator} ÷ {target.denominator}", measured, target.text, aim, said)
