#include "engine/flat_updater.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>

#include "tranche/core/error.h"
#include "tranche/kernels/elementwise.h"

namespace tranche {

FlatUpdater::FlatUpdater(const Optimizer& optimizer, std::span<const TensorState> tensors,
                         DataType accumulation, DataType compute)
    : optimizer_(optimizer), accumulation_(accumulation), compute_(compute) {
  const TensorState* first = nullptr;
  for (const TensorState& tensor : tensors) {
    Tensor entry{{tensor.name, tensor.shape, tensor.group}};
    const auto known = std::find(groups_.begin(), groups_.end(), tensor.group);
    entry.group = static_cast<int>(known - groups_.begin());
    if (known == groups_.end()) groups_.push_back(tensor.group);
    if (!tensor.frozen) {
      std::vector<OptimizerStateTensor> state = optimizer.state(entry.facts);
      if (first == nullptr) {
        first = &tensor;
        state_ = std::move(state);
      } else if (state != state_) {
        throw ConfigurationError(fmt::format(
            "optimizer {} keeps other state for tensor {} than for {}; engines keep the same state for all "
            "trainable tensors up to now",
            optimizer.name(), tensor.name, first->name));
      }
      if (optimizer.needs_whole_matrices(entry.facts)) {
        throw ConfigurationError(
            fmt::format("optimizer {} computes tensor {} as a whole matrix, which engines do not bring "
                        "together up to now",
                        optimizer.name(), tensor.name));
      }
      if (const int sums = optimizer.sums(entry.facts); sums > 0) {
        entry.first_sum = sum_count_;
        sum_count_ += sums;
      }
    }
    tensors_.push_back(std::move(entry));
  }
  if (!groups_.empty()) number_bytes_ = optimizer.numbers(OptimizerStep{}, groups_.front()).size();
  stride_ = aligned_bytes(static_cast<std::int64_t>(number_bytes_));
}

void FlatUpdater::allocate(MemoryResource& memory, bool whole) {
  if (stride_ > 0) {
    numbers_ = Buffer(memory, static_cast<std::int64_t>(groups_.size()) * stride_, Category::other,
                      "optimizer arguments");
  }
  if (sum_count_ > 0) {
    sums_ = Buffer(memory, (whole ? 2 : 1) * sum_count_ * 8, Category::other, "optimizer sums");
  }
}

void FlatUpdater::send_numbers(Device& device, Stream& compute, Stream* host, const OptimizerStep& step) {
  if (stride_ == 0) return;
  std::vector<std::byte> bytes(groups_.size() * static_cast<std::size_t>(stride_));
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const std::vector<std::byte> numbers = optimizer_.numbers(step, groups_[g]);
    if (numbers.size() != number_bytes_) {
      throw InvalidArgument(
          fmt::format("optimizer {} gives {} bytes of numbers where it gave {} at the start",
                      optimizer_.name(), numbers.size(), number_bytes_));
    }
    std::copy(numbers.begin(), numbers.end(), bytes.begin() + static_cast<std::ptrdiff_t>(g) * stride_);
  }
  device.copy_from_host(compute, numbers_.data(), bytes.data(), static_cast<std::int64_t>(bytes.size()));
  if (host == nullptr) return;
  if (!host_numbers_) host_numbers_ = std::make_shared<std::vector<std::byte>>(bytes.size());
  host->enqueue("optimizer numbers", [to = host_numbers_, from = std::move(bytes)] {
    std::copy(from.begin(), from.end(), to->begin());  // in place: ranges have its address
  });
}

void FlatUpdater::clear_sums(Stream& compute, Stream* host) {
  kernels::fill_zero(compute, {sums_.data(), DataType::float64, Shape{sums_.bytes() / 8}});
  if (host == nullptr) return;
  const auto count = static_cast<std::size_t>(sums_.bytes() / 8);
  if (!host_sums_) host_sums_ = std::make_shared<std::vector<double>>(count);
  host->enqueue("optimizer sums", [sums = host_sums_] { std::fill(sums->begin(), sums->end(), 0.0); });
}

double* FlatUpdater::sums_of(const FlatPart& part) {
  if (sum_count_ == 0) return nullptr;
  return part.on_host ? host_sums_->data() : static_cast<double*>(sums_.data());
}

void FlatUpdater::add_segments(const FlatPart& part, ElementRange range, double* sums,
                               std::vector<TensorSegment>& segments) const {
  for (const TensorPiece& piece : part.layout.pieces(range)) {
    const auto index = static_cast<std::size_t>(part.tensors[static_cast<std::size_t>(piece.tensor)]);
    const Tensor& tensor = tensors_[index];
    TensorSegment segment;
    segment.first = piece.buffer_begin - part.memory.range.begin;
    segment.count = piece.elements;
    segment.tensor = &tensor.facts;
    segment.first_element = piece.tensor_begin;
    segment.group = tensor.group;
    if (tensor.first_sum >= 0) segment.sums = sums + tensor.first_sum;
    segments.push_back(segment);
  }
}

UpdateRange FlatUpdater::range_of(const FlatPart& part, std::span<const TensorSegment> segments) const {
  const UpdateMemory& memory = part.memory;
  const Shape shape{memory.range.size()};
  UpdateRange range;
  range.gradient = {memory.gradient, accumulation_, shape};
  range.master = {memory.master, DataType::float32, shape};
  for (std::size_t s = 0; s < state_.size(); ++s) {
    range.state.push_back({memory.state[s], state_[s].dtype, shape});
  }
  range.weight = {memory.weight, compute_, shape};
  range.segments = segments;
  if (stride_ > 0) {
    range.numbers = part.on_host ? host_numbers_->data() : static_cast<const std::byte*>(numbers_.data());
  }
  range.numbers_stride = stride_;
  range.groups = static_cast<int>(groups_.size());
  return range;
}

void FlatUpdater::prepare(Stream& stream, const OptimizerStep& step, const FlatPart& part, ElementRange own) {
  std::vector<TensorSegment> segments;
  double* const counted = sums_of(part);
  double* const uncounted = counted + sum_count_;  // only written to where a rank keeps other ranks' shares
  const ElementRange kept = part.memory.range;
  add_segments(part, {kept.begin, own.begin}, uncounted, segments);
  add_segments(part, own, counted, segments);
  add_segments(part, {own.end, kept.end}, uncounted, segments);
  UpdateRange range = range_of(part, segments);
  range.weight.data = nullptr;
  optimizer_.prepare(stream, step, range);
}

void FlatUpdater::exchange_sums(Device& device, Stream& compute, Stream* host, Communicator& group) {
  const auto count = static_cast<std::size_t>(sum_count_);
  const std::int64_t bytes = sum_count_ * 8;
  std::vector<double> sums(count, 0.0);
  device.copy_to_host(compute, sums.data(), sums_.data(), bytes);
  compute.synchronize();
  if (host != nullptr) {
    // All of a tensor's state is on one tier, so one of the two has its sums and the other zero.
    host->synchronize();
    for (std::size_t i = 0; i < count; ++i) sums[i] += (*host_sums_)[i];
  }
  // Without peers that answer (a plan) every rank is taken to say what this one says.
  const auto ranks = static_cast<std::size_t>(group.size());
  const std::size_t stride = group.simulated() ? 0 : count;
  std::vector<double> all(count + stride * (ranks - 1));
  std::copy(sums.begin(), sums.end(), all.begin());
  group
      .all_gather(sums.data(), all.data(), bytes, DataType::uint8, 0, {},
                  OperationLabel{"step", "optimizer sums", Traffic::control, Tier::host})
      .wait();
  for (std::size_t i = 0; i < count; ++i) {
    sums[i] = 0;
    for (std::size_t r = 0; r < ranks; ++r) sums[i] += all[stride * r + i];
  }
  device.copy_from_host(compute, sums_.data(), sums.data(), bytes);
  if (host == nullptr) return;
  host->enqueue("optimizer sums", [to = host_sums_, from = std::move(sums)] {
    std::copy(from.begin(), from.end(), to->begin());
  });
}

void FlatUpdater::apply(Stream& stream, const OptimizerStep& step, const FlatPart& part, bool fresh_weights) {
  std::vector<TensorSegment> segments;
  add_segments(part, part.memory.range, sums_of(part), segments);
  if (fresh_weights && part.memory.weight != nullptr) {
    std::int64_t next = 0;
    const auto zero_to = [&](std::int64_t element) {
      if (element <= next) return;
      kernels::fill_zero(stream,
                         {part.memory.weight + next * size_of(compute_), compute_, Shape{element - next}});
    };
    for (const TensorSegment& segment : segments) {
      zero_to(segment.first);
      next = segment.first + segment.count;
    }
    zero_to(part.memory.range.size());
  }
  optimizer_.apply(stream, step, range_of(part, segments));
}

}  // namespace tranche
