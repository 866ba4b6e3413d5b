"""Makes transformers know TinyONN: import this, and `from_pretrained` loads it without remote code."""

from transformers import AutoConfig, AutoModelForCausalLM

from models.tiny_onn.configuration_tiny_onn import TinyONNConfig
from models.tiny_onn.modeling_tiny_onn import TinyONNForCausalLM

AutoConfig.register(TinyONNConfig.model_type, TinyONNConfig, exist_ok=True)
AutoModelForCausalLM.register(TinyONNConfig, TinyONNForCausalLM, exist_ok=True)
# save_pretrained puts the code beside the weights.
TinyONNConfig.register_for_auto_class()
TinyONNForCausalLM.register_for_auto_class("AutoModelForCausalLM")
