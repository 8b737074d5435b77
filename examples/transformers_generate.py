"""Generate with transformers from a converted checkpoint: `transformers_generate.py DST "The capital of France is"`.

Works for models whose experts take transformers' experts interface (`docs/how-to/vllm.md`). The import is all that is
needed; on a GPU the experts run in moeq's kernels.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import moeq.engines.transformers  # noqa: F401 - registers the quantisation method `moeq`

folder, prompt = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map=device)
inputs = tokenizer(prompt, return_tensors="pt").to(device)
output = model.generate(**inputs, max_new_tokens=32, do_sample=False)
print(tokenizer.decode(output[0], skip_special_tokens=True))
