"""tgi: a server for large language models, compatible with Text Generation Inference."""

__version__ = "0.1.0"
