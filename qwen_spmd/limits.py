# SPDX-License-Identifier: Apache-2.0
"""Numbers that the scheduler and the step programs agree on. Here because the one may not import the other: no jax."""

MAX_STOP_IDS = 16
"""Stop token ids that one request can have on the device."""

FROM_SLOT = -1
"""In a step's `tokens_T`: take the token that was last sampled in the sequence's slot."""

INT32_MAX = 2**31 - 1
"""What the device's integers hold."""
