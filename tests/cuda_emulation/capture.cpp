// Capture of streams into graphs, and their launch.
#include <fmt/format.h>

#include "tests/cuda_emulation/state.h"

struct CUgraph_st {
  std::vector<cuda_emulation::Operation> operations;
};
struct CUgraphExec_st {
  std::shared_ptr<const std::vector<cuda_emulation::Operation>> operations;
  std::string problem;
};

namespace cuda_emulation {

void set_capture(cudaStream_t stream, std::shared_ptr<Capture> capture);

namespace {

struct Captures {
  std::set<std::shared_ptr<Capture>> open;  // guarded by capture_mutex()
  std::mutex mutex;
  std::set<cudaGraph_t> graphs;
  std::set<cudaGraphExec_t> executables;
};

Captures& captures() {
  static Captures& instance = *new Captures;
  return instance;
}

thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

}  // namespace

bool is_capturing(cudaStream_t stream) {
  return capture_of(stream) != nullptr;
}

// The rules of cudaThreadExchangeStreamCaptureMode. Unsafe calls are refused while this thread captures in a
// mode other than relaxed. For threads in global mode they are also refused while any thread captures in
// global mode.
cudaError_t refuse_under_capture(const char* name) {
  bool refused = false;
  {
    std::lock_guard lock(capture_mutex());
    for (const auto& capture : captures().open) {
      if (thread_mode == cudaStreamCaptureModeRelaxed) continue;
      const bool mine =
          capture->thread == std::this_thread::get_id() && capture->mode != cudaStreamCaptureModeRelaxed;
      const bool global =
          capture->mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal;
      if (!mine && !global) continue;
      capture->invalid = true;
      refused = true;
    }
  }
  if (!refused) return cudaSuccess;
  return misuse(cudaErrorStreamCaptureUnsupported,
                fmt::format("{} is not permitted while a stream is captured", name));
}

cudaError_t refuse_on_captured(const char* name, cudaStream_t stream) {
  const auto capture = capture_of(stream);
  if (!capture) return cudaSuccess;
  {
    std::lock_guard lock(capture_mutex());
    capture->invalid = true;
  }
  return misuse(cudaErrorStreamCaptureUnsupported,
                fmt::format("{} is not permitted on a captured stream", name));
}

}  // namespace cuda_emulation

using namespace cuda_emulation;

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  return call("cudaStreamBeginCapture", [&] {
    if (device_of(stream) < 0) return cudaErrorInvalidResourceHandle;
    if (is_capturing(stream))
      return misuse(cudaErrorIllegalState, "cudaStreamBeginCapture: the stream is captured already");
    auto capture = std::make_shared<Capture>();
    capture->mode = mode;
    capture->thread = std::this_thread::get_id();
    capture->origin = stream;
    capture->streams.insert(stream);
    {
      std::lock_guard lock(capture_mutex());
      captures().open.insert(capture);
    }
    set_capture(stream, capture);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  return call("cudaStreamEndCapture", [&] {
    const auto capture = capture_of(stream);
    if (graph != nullptr) *graph = nullptr;
    if (!capture) return misuse(cudaErrorIllegalState, "cudaStreamEndCapture: the stream is not captured");
    if (capture->origin != stream) return cudaErrorStreamCaptureUnmatched;
    if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id()) {
      return cudaErrorStreamCaptureWrongThread;
    }
    for (cudaStream_t each : capture->streams) set_capture(each, nullptr);
    std::lock_guard lock(capture_mutex());
    captures().open.erase(capture);
    if (capture->invalid) return cudaErrorStreamCaptureInvalidated;
    if (!capture->unjoined.empty()) {
      return misuse(cudaErrorStreamCaptureUnjoined,
                    fmt::format("cudaStreamEndCapture: work of {} other streams is not waited for",
                                capture->unjoined.size()));
    }
    auto* made = new CUgraph_st{std::move(capture->operations)};
    std::lock_guard graphs_lock(captures().mutex);
    captures().graphs.insert(made);
    *graph = made;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return call("cudaStreamIsCapturing", [&] {
    const auto capture = capture_of(stream);
    *status = !capture           ? cudaStreamCaptureStatusNone
              : capture->invalid ? cudaStreamCaptureStatusInvalidated
                                 : cudaStreamCaptureStatusActive;
    return cudaSuccess;
  });
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return call("cudaThreadExchangeStreamCaptureMode", [&] {
    std::swap(*mode, thread_mode);
    return cudaSuccess;
  });
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  return call("cudaGraphInstantiate", [&] {
    std::lock_guard lock(captures().mutex);
    if (captures().graphs.count(graph) == 0) return cudaErrorInvalidValue;
    *executable = new CUgraphExec_st{std::make_shared<const std::vector<Operation>>(graph->operations), {}};
    captures().executables.insert(*executable);
    return cudaSuccess;
  });
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph,
                                          unsigned long long flags) {
  return cudaGraphInstantiate(executable, graph, flags);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  return call("cudaGraphLaunch", [&] {
    std::shared_ptr<const std::vector<Operation>> operations;
    {
      std::lock_guard lock(captures().mutex);
      if (captures().executables.count(executable) == 0) {
        return misuse(cudaErrorInvalidValue, "cudaGraphLaunch: no such executable graph");
      }
      operations = executable->operations;
    }
    count_graph_launch();
    // Operations run one by one, so that host functions have no access to device memory.
    for (std::size_t i = 0; i < operations->size(); ++i) {
      const cudaError_t error =
          submit(stream, {[operations, i] { (*operations)[i].run(); }, (*operations)[i].on_device});
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  });
}

cudaError_t cudaGraphUpload(cudaGraphExec_t executable, cudaStream_t stream) {
  return call("cudaGraphUpload", [&] {
    std::lock_guard lock(captures().mutex);
    if (captures().executables.count(executable) == 0) return cudaErrorInvalidValue;
    return device_of(stream) < 0 ? cudaErrorInvalidResourceHandle : cudaSuccess;
  });
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, std::size_t* count) {
  return call("cudaGraphGetNodes", [&] {
    std::lock_guard lock(captures().mutex);
    if (captures().graphs.count(graph) == 0 || nodes != nullptr)
      return cudaErrorInvalidValue;  // only the count is supported
    *count = graph->operations.size();
    return cudaSuccess;
  });
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  return call(
      "cudaGraphExecDestroy",
      [&] {
        std::lock_guard lock(captures().mutex);
        if (captures().executables.erase(executable) == 0) return cudaErrorInvalidValue;
        delete executable;
        return cudaSuccess;
      },
      Sticky::ignored);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return call(
      "cudaGraphDestroy",
      [&] {
        std::lock_guard lock(captures().mutex);
        if (captures().graphs.erase(graph) == 0) return cudaErrorInvalidValue;
        delete graph;
        return cudaSuccess;
      },
      Sticky::ignored);
}
