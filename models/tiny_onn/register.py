"""Register TinyONN with transformers: after this import `from_pretrained` loads it without remote code."""

import transformers

from models.targets.tiny_onn import AUTO_CLASSES
from models.tiny_onn import modeling_tiny_onn
from models.tiny_onn.configuration_tiny_onn import TinyONNConfig

for _name, _place in AUTO_CLASSES.items():
    _key = TinyONNConfig.model_type if _name == "AutoConfig" else TinyONNConfig
    _class = getattr(modeling_tiny_onn, _place.rpartition(".")[2])
    getattr(transformers, _name).register(_key, _class, exist_ok=True)
    # save_pretrained then copies the code to the weights' folder, and names this class; of several, the last.
    _class.register_for_auto_class(_name)
