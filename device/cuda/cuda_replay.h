#pragma once
/// Replay by CUDA graphs.

#include <string>

#include "device/cuda/cuda_stream.h"
#include "tranche/device/replay.h"

namespace tranche::cuda {

class GraphReplay : public Replay {
 public:
  GraphReplay(std::shared_ptr<CudaState> state, std::string name)
      : state_(std::move(state)), name_(std::move(name)) {}
  ~GraphReplay() override { forget_graph(); }
  void run(Stream& stream, const std::function<void()>& issue) override;
  void forget() override;
  const std::string& problem() const noexcept override { return problem_; }

 private:
  enum class Next { issue, capture, launch };
  /// Captures an executable graph, or stores the reason in problem_.
  void capture(CudaStream& stream, const std::function<void()>& issue);
  void launch(CudaStream& stream);
  void forget_graph() noexcept;

  std::shared_ptr<CudaState> state_;
  std::string name_;
  std::string problem_;
  Next next_ = Next::issue;
  cudaGraphExec_t graph_ = nullptr;
  WorkCount work_;  // of one run
};

}  // namespace tranche::cuda
