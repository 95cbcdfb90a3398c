"""Errors that manifolds raise."""

__all__ = ["LogNotConvergedError", "NotOnManifoldError"]


class NotOnManifoldError(ValueError):
    """A point is off its manifold, or a vector off its tangent space, by more than rounding explains.

    Attributes:
        error: the largest violation found, in the units of ``point_error`` or ``tangent_error``.
        atol: the tolerance it was held to.
    """

    def __init__(self, message: str, error: float, atol: float) -> None:
        super().__init__(message)
        self.error = error
        self.atol = atol

    def __reduce__(self):
        return type(self), (self.args[0], self.error, self.atol)


class LogNotConvergedError(ValueError):
    """No logarithm was found: the points are too far apart, or at each other's cut locus.

    Attributes:
        residual: ‖exp(x, u) − y‖ at the best u that was found.
    """

    def __init__(self, message: str, residual: float) -> None:
        super().__init__(message)
        self.residual = residual

    def __reduce__(self):
        return type(self), (self.args[0], self.residual)
