"""Random numbers for the scripts that write golden vectors of optimizers; the tests draw the same numbers."""


def draw(seed, count):
    """Numbers in (-1, 1) with 24 bits from SplitMix64, which the test draws too."""
    state, values = seed, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & (2**64 - 1)
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        z ^= z >> 31
        values.append((z >> 40) * 2.0**-23 - 1.0)
    return values
