"""The one exception of the package that Python has no name for."""


class UnsupportedError(RuntimeError):
    """No kernel of this build can run the problem on the device.

    The message says what to change and gives the nearest rows' reasons; ``explain`` has those of all.
    """
