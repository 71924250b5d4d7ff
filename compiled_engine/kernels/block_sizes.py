"""Sizes of grids and blocks; Triton's own functions of these names cost the host a microsecond each."""


def cdiv(number: int, divisor: int) -> int:
    """number / divisor, rounded up."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()
