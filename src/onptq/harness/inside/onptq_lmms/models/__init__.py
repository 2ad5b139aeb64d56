"""The names by which lmms-eval finds the models: each in a module of its name."""

AVAILABLE_MODELS = {"onptq_folder": "Folder", "onptq_endpoint": "Endpoint"}
