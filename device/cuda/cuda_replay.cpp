#include "device/cuda/cuda_replay.h"

#include <utility>

namespace tranche::cuda {
namespace {

WorkCount difference(const WorkCount& after, const WorkCount& before) {
  return {after.kernels - before.kernels, after.floating_point_operations - before.floating_point_operations,
          after.bytes_read - before.bytes_read, after.bytes_written - before.bytes_written};
}

}  // namespace

void GraphReplay::run(Stream& stream, const std::function<void()>& issue) {
  auto* const cuda_stream = dynamic_cast<CudaStream*>(&stream);
  if (cuda_stream == nullptr) {
    throw InvalidArgument("replay '" + name_ + "' belongs to a cuda device, but stream '" + stream.name() +
                          "' is of kind " + std::string(name_of(stream.kind())));
  }
  if (next_ == Next::launch) {
    launch(*cuda_stream);
    stream.count(work_);
    return;
  }
  if (next_ == Next::issue) {
    issue();
    if (problem_.empty()) next_ = Next::capture;
    return;
  }
  const WorkCount before = stream.work();
  capture(*cuda_stream, issue);
  work_ = difference(stream.work(), before);
  if (graph_ != nullptr) {
    next_ = Next::launch;
    launch(*cuda_stream);
    return;
  }
  stream.count(difference(before, stream.work()));  // captured work did not run
  next_ = Next::issue;
  issue();
}

void GraphReplay::capture(CudaStream& stream, const std::function<void()>& issue) {
  const WorkCount before = stream.work();
  stream.begin_capture();
  std::string refused;
  try {
    issue();
  } catch (const CaptureRefused& refusal) {
    refused = refusal.message();
  } catch (const DeviceError& error) {
    refused = error.message();  // a fault of the work itself recurs when it is issued plainly
  } catch (...) {
    try {
      if (const cudaGraph_t graph = stream.end_capture(); graph != nullptr) cudaGraphDestroy(graph);
    } catch (...) {  // the failure of the work itself is more informative
    }
    stream.count(difference(before, stream.work()));
    throw;
  }
  cudaGraph_t graph = nullptr;
  try {
    graph = stream.end_capture();
  } catch (const DeviceError& error) {
    if (refused.empty()) refused = error.message();
  }
  if (refused.empty()) {
    const cudaError_t error = cudaGraphInstantiate(&graph_, graph, 0);
    if (error != cudaSuccess) {
      cudaGetLastError();
      graph_ = nullptr;
      refused = error_text(error, "cudaGraphInstantiate", name_);
    }
  }
  if (graph != nullptr) cudaGraphDestroy(graph);
  if (!refused.empty()) {
    problem_ = "'" + name_ + "' is issued anew each time instead of replayed as a CUDA graph: " + refused;
  }
}

void GraphReplay::launch(CudaStream& stream) {
  const StreamSpan span(stream, name_);
  check(cudaGraphLaunch(graph_, static_cast<cudaStream_t>(stream.native_handle())), "cudaGraphLaunch", name_);
  state_->count_replay();
}

void GraphReplay::forget() {
  forget_graph();
  problem_.clear();
  next_ = Next::issue;
}

// Waits for a graph in flight, because the runtime frees it here.
void GraphReplay::forget_graph() noexcept {
  if (graph_ == nullptr) return;
  state_->make_current_quietly();
  cudaGraphExecDestroy(graph_);
  graph_ = nullptr;
}

}  // namespace tranche::cuda
