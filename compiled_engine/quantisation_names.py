"""Names of the quantisations that options accept, in a file that does not import torch.

Options are read before torch is imported.
"""

from __future__ import annotations

# Quantising weights while they are loaded: name -> scheme, for LinearScheme.parse.
ONLINE = {
    "fp8": "e4m3 1x*, inputs e4m3 1x*",
    "fp8_block": "e4m3 128x128, inputs e4m3 1x128",
    "int4": "int4 1x128",
}
# The method of GPT-OSS: experts in four bits, with powers of two as scales.
MXFP4 = "mxfp4"
# Values of quant_method that are supported in quantised checkpoints.
METHODS = ("compressed-tensors", "fp8", "gptq", "awq", "modelopt", MXFP4)
