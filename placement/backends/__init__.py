"""The backends: each file adapts one library or compiler; `base.Backend` is what they have in common.

    aten         PyTorch's own kernels (oneDNN, MKL, cuDNN, cuBLAS), one operation after the other
    prepacked    the same libraries with channels-last layout, weights packed beforehand, and fusion
    inductor     TorchInductor, frozen for inference; on CUDA it generates Triton
    onnxruntime  ONNX Runtime through IOBinding
    openvino     OpenVINO on shared tensors
    onednn_graph oneDNN Graph through TorchScript
    tvm          TVM Relax through DLPack, tuned by MetaSchedule
    cuda         cuDNN, cuBLAS, and captured CUDA graphs
    tensorrt     TensorRT through torch_tensorrt

Nothing here imports an optional package before a backend is used.
"""

from placement.backends.base import Backend

__all__ = ["Backend", "built_in"]


def built_in() -> list[Backend]:
    """One of each backend of this package."""
    from placement.backends.aten import Aten
    from placement.backends.cuda import Cublas, CudaGraphs, Cudnn
    from placement.backends.inductor import Inductor
    from placement.backends.onednn_graph import OneDNNGraph
    from placement.backends.onnxruntime import OnnxRuntime
    from placement.backends.openvino import OpenVINO
    from placement.backends.prepacked import ChannelsLast, Prepacked
    from placement.backends.tensorrt import TensorRT
    from placement.backends.tvm import TVM

    on_cpu = [ChannelsLast(), Prepacked(), Inductor(), OneDNNGraph(), OnnxRuntime(), OpenVINO(), TVM()]
    return [Aten(), *on_cpu, Cudnn(), Cublas(), CudaGraphs(), TensorRT()]
