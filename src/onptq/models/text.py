"""Language models without towers."""

from __future__ import annotations

from onptq.models.family import Family

LLAMA = Family(name="llama", model_types=("llama",), model_class="LlamaForCausalLM")
QWEN2 = Family(name="qwen2", model_types=("qwen2",), model_class="Qwen2ForCausalLM")
QWEN3 = Family(name="qwen3", model_types=("qwen3",), model_class="Qwen3ForCausalLM")
QWEN3_MOE = Family(name="qwen3-moe", model_types=("qwen3_moe",), model_class="Qwen3MoeForCausalLM", sparse=True)
