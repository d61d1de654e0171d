#include "device/cuda/launch_bound.h"

namespace tranche::cuda {

LaunchBound::~LaunchBound() {
  forget();
}

void LaunchBound::forget() noexcept {
  for (const cudaEvent_t mark : marks_) state_->give_event(mark, false);
  marks_.clear();
}

void LaunchBound::before_operation(cudaStream_t stream) noexcept {
  // A capturing thread must not wait, and captures are short.
  if (++since_mark_ < interval || state_->capturing()) return;
  since_mark_ = 0;
  try {
    marks_.push_back(nullptr);
    marks_.back() = state_->take_event(false);
    check(cudaEventRecord(marks_.back(), stream), "cudaEventRecord");
    while (marks_.size() > most_marks) {
      check(cudaEventSynchronize(marks_.front()), "cudaEventSynchronize");
      state_->give_event(marks_.front(), false);
      marks_.pop_front();
    }
  } catch (...) {
    forget();  // the operation that follows fails too, and reports its name
  }
}

}  // namespace tranche::cuda
