# SPDX-License-Identifier: Apache-2.0
"""What a model needs and how fast it can be on hardware that is not there: `python -m qwen_spmd.plan`.

`memory` says whether it fits, `roofline` bounds the time of a step block by block, `compile` takes the real step
programs through the TPU's compiler and reads what came out. No device is used, nothing is allocated.
"""
