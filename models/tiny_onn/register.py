"""Register TinyONN with transformers: after this import `from_pretrained` loads it without remote code."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from models.tiny_onn.configuration_tiny_onn import TinyONNConfig
from models.tiny_onn.modeling_tiny_onn import TinyONNForCausalLM, TinyONNModel

AutoConfig.register(TinyONNConfig.model_type, TinyONNConfig, exist_ok=True)
AutoModel.register(TinyONNConfig, TinyONNModel, exist_ok=True)
AutoModelForCausalLM.register(TinyONNConfig, TinyONNForCausalLM, exist_ok=True)
# save_pretrained then copies the code to the weights' folder.
TinyONNConfig.register_for_auto_class()
TinyONNModel.register_for_auto_class("AutoModel")
TinyONNForCausalLM.register_for_auto_class("AutoModelForCausalLM")
