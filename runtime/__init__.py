"""The host side of a bundle, in NumPy over ONNX Runtime."""
