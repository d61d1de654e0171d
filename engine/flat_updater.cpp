#include "engine/flat_updater.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>

#include "tranche/core/error.h"
#include "tranche/kernels/elementwise.h"

namespace tranche::detail {

namespace {
constexpr auto partial_bytes = static_cast<std::int64_t>(sizeof(SquareSum));
}

FlatUpdater::FlatUpdater(const Optimizer& optimizer, std::span<const TensorState> tensors,
                         const PrecisionConfig& precision, std::uint64_t seed)
    : optimizer_(optimizer), all_tensors_(tensors) {
  if (precision.master != MasterFormat::fp32 && !optimizer.takes_master_formats()) {
    throw ConfigurationError(
        fmt::format("tranche.master: optimizer {} updates fp32 master weights alone, not {} "
                    "(Optimizer::takes_master_formats)",
                    optimizer.name(), name_of(precision.master)));
  }
  if (precision.stochastic_rounding) rounding_seed_ = seed;
  for (const TensorState& tensor : tensors) {
    Tensor entry{trainable_tensor(tensor), tensor.model_index};
    const auto known = std::find(groups_.begin(), groups_.end(), tensor.group);
    entry.group = static_cast<int>(known - groups_.begin());
    if (known == groups_.end()) groups_.push_back(tensor.group);
    if (!tensor.frozen) {
      const int sums = optimizer.sums(entry.facts);
      if (sums > 0 && optimizer.needs_whole_matrices(entry.facts)) {
        throw ConfigurationError(
            fmt::format("optimizer {} asks for sums of tensor {}, which it computes as a whole matrix; one "
                        "rank has all of it then",
                        optimizer.name(), tensor.name));
      }
      if (sums > 0) {
        entry.first_sum = sum_count_;
        sum_count_ += sums;
      }
    }
    tensors_.push_back(entry);
  }
  if (!groups_.empty()) number_bytes_ = optimizer.numbers(OptimizerStep{}, groups_.front()).size();
  stride_ = aligned_bytes(static_cast<std::int64_t>(number_bytes_));
}

std::int64_t FlatUpdater::numbers_bytes() const {
  const auto key = static_cast<std::int64_t>(rounding_seed_ ? sizeof(kernels::RoundingKey) : 0);
  return static_cast<std::int64_t>(groups_.size()) * stride_ + key;
}

void FlatUpdater::allocate(MemoryResource& memory, bool whole) {
  if (numbers_bytes() > 0) {
    numbers_ = Buffer(memory, numbers_bytes(), Category::other, "optimizer arguments");
  }
  if (sum_count_ > 0) {
    partial_count_ = (whole ? 2 : 1) * sum_count_;
    sums_ =
        Buffer(memory, sum_count_ * 8 + partial_count_ * partial_bytes, Category::other, "optimizer sums");
  }
}

void FlatUpdater::send_numbers(Device& device, Stream& compute, Stream* host, const OptimizerStep& step) {
  if (numbers_bytes() == 0) return;
  std::vector<std::byte> bytes(static_cast<std::size_t>(numbers_bytes()));
  if (rounding_seed_) {
    const kernels::RoundingKey key{*rounding_seed_, step.step};
    std::memcpy(bytes.data() + bytes.size() - sizeof(key), &key, sizeof(key));
  }
  for (std::size_t g = 0; stride_ > 0 && g < groups_.size(); ++g) {
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
  if (!host_sums_) {
    host_sums_ = std::make_shared<HostSums>();
    host_sums_->sums.resize(static_cast<std::size_t>(sum_count_));
    host_sums_->partial.resize(static_cast<std::size_t>(partial_count_));
  }
  host->enqueue("optimizer sums",
                [sums = host_sums_] { std::fill(sums->partial.begin(), sums->partial.end(), SquareSum{}); });
}

double* FlatUpdater::sums_of(const ShardSlice& slice) {
  if (sum_count_ == 0) return nullptr;
  return slice.on_host ? host_sums_->sums.data() : static_cast<double*>(sums_.data());
}

SquareSum* FlatUpdater::partial_of(const ShardSlice& slice) {
  if (slice.on_host) return host_sums_->partial.data();
  return reinterpret_cast<SquareSum*>(static_cast<double*>(sums_.data()) + sum_count_);
}

void FlatUpdater::add_segments(const FlatBuffer& flat, ElementRange range, std::int64_t first,
                               const double* sums, SquareSum* partial,
                               std::vector<TensorSegment>& segments) const {
  for (const TensorPiece& piece : flat.layout.pieces(range)) {
    const auto index = static_cast<std::size_t>(flat.tensors[static_cast<std::size_t>(piece.tensor)]);
    const Tensor& tensor = tensors_[index];
    TensorSegment segment;
    segment.first = piece.buffer_begin - first;
    segment.count = piece.elements;
    segment.tensor = &tensor.facts;
    segment.index = tensor.index;
    segment.first_element = piece.tensor_begin;
    segment.group = tensor.group;
    if (tensor.first_sum >= 0 && sums != nullptr) segment.sums = sums + tensor.first_sum;
    if (tensor.first_sum >= 0 && partial != nullptr) segment.partial = partial + tensor.first_sum;
    if (!rounding_seed_) {
      segments.push_back(segment);
      continue;
    }
    // Random numbers go by an element's place in the whole tensor.
    for_each_run(all_tensors_[index], {piece.tensor_begin, piece.tensor_begin + piece.elements},
                 [&](const TensorRun& run) {
                   TensorSegment part = segment;
                   part.first += run.local - piece.tensor_begin;
                   part.count = run.elements;
                   part.first_element = run.global;
                   segments.push_back(part);
                 });
  }
}

UpdateRange FlatUpdater::range_of(const ShardSlice& slice, std::span<const TensorSegment> segments) const {
  UpdateRange range;
  range.gradient = slice.gradient;
  range.master = slice.master;
  range.state = slice.state;
  range.weight = slice.weight;
  range.segments = segments;
  const std::byte* const numbers = numbers_bytes() == 0 ? nullptr
                                   : slice.on_host      ? host_numbers_->data()
                                                        : static_cast<const std::byte*>(numbers_.data());
  if (stride_ > 0) range.numbers = numbers;
  range.rounding = slice.rounding;
  if (rounding_seed_) {
    range.rounding_key = reinterpret_cast<const kernels::RoundingKey*>(numbers + numbers_bytes() -
                                                                       sizeof(kernels::RoundingKey));
  }
  range.numbers_stride = stride_;
  range.groups = static_cast<int>(groups_.size());
  return range;
}

void FlatUpdater::prepare(const OptimizerStep& step, const FlatBuffer& flat, const ShardSlice& slice) {
  std::vector<TensorSegment> segments;
  SquareSum* const counted = partial_of(slice);
  SquareSum* const uncounted =
      counted + sum_count_;  // only written to where a rank keeps other ranks' shares
  const ElementRange kept = slice.range, owned = flat.owned();
  const ElementRange own{std::clamp(owned.begin, kept.begin, kept.end),
                         std::clamp(owned.end, kept.begin, kept.end)};
  add_segments(flat, {kept.begin, own.begin}, kept.begin, nullptr, uncounted, segments);
  add_segments(flat, own, kept.begin, nullptr, counted, segments);
  add_segments(flat, {own.end, kept.end}, kept.begin, nullptr, uncounted, segments);
  UpdateRange range = range_of(slice, segments);
  if (!slice.in_halves()) range.weight.data = nullptr;
  optimizer_.prepare(*slice.stream, step, range);
}

void FlatUpdater::prepare(const OptimizerStep& step, const FlatBuffer& flat, const ShardSlice& piece,
                          const TensorView& message, const TensorView& scratch) {
  std::vector<TensorSegment> segments;
  add_segments(flat, piece.range, piece.range.begin, nullptr, nullptr, segments);
  UpdateRange range = range_of(piece, segments);
  range.weight.data = nullptr;
  range.message = message;
  range.scratch = scratch;
  optimizer_.prepare(*piece.stream, step, range);
}

void FlatUpdater::exchange_sums(Device& device, Stream& compute, Stream* host, Communicator& all_ranks) {
  const auto count = static_cast<std::size_t>(sum_count_);
  const std::int64_t bytes = sum_count_ * partial_bytes;
  std::vector<SquareSum> mine(count);
  device.copy_to_host(compute, mine.data(), static_cast<double*>(sums_.data()) + sum_count_, bytes);
  compute.synchronize();
  if (host != nullptr) host->synchronize();
  for (std::size_t i = 0; i < count; ++i) {
    mine[i].normalize();
    // All of a tensor's state is on one tier, so one of the two has its sums and the other zero.
    if (host != nullptr) mine[i] += host_sums_->partial[i];
  }
  // In a plan no peer answers, and all ranks are assumed to have this one's sums.
  const auto ranks = static_cast<std::size_t>(all_ranks.size());
  const std::size_t stride = all_ranks.simulated() ? 0 : count;
  std::vector<SquareSum> all(count + stride * (ranks - 1));
  std::copy(mine.begin(), mine.end(), all.begin());
  all_ranks
      .all_gather(mine.data(), all.data(), bytes, DataType::uint8, 0, {},
                  OperationLabel{"step", "optimizer sums", Traffic::control, Tier::host})
      .wait();
  std::vector<double> sums;
  for (std::size_t i = 0; i < count; ++i) {
    SquareSum sum = all[i];
    for (std::size_t r = 1; r < ranks; ++r) sum += all[stride * r + i];
    sums.push_back(sum.value());
  }
  device.copy_from_host(compute, sums_.data(), sums.data(), sum_count_ * 8);
  if (host == nullptr) return;
  host->enqueue("optimizer sums", [to = host_sums_, from = std::move(sums)] {
    std::copy(from.begin(), from.end(), to->sums.begin());  // in place: ranges have its address
  });
}

void FlatUpdater::apply(const OptimizerStep& step, const FlatBuffer& flat, const ShardSlice& slice,
                        bool fresh_weights, const TensorView& message) {
  std::vector<TensorSegment> segments;
  add_segments(flat, slice.range, slice.range.begin, sums_of(slice), nullptr, segments);
  if (fresh_weights && slice.weight.data != nullptr) {
    std::int64_t next = 0;
    const auto zero_to = [&](std::int64_t element) {
      if (element > next) kernels::fill_zero(*slice.stream, part_of(slice.weight, 0, {next, element}));
    };
    for (const TensorSegment& segment : segments) {
      zero_to(segment.first);
      next = segment.first + segment.count;
    }
    zero_to(slice.range.size());
  }
  UpdateRange range = range_of(slice, segments);
  range.message = message;
  optimizer_.apply(*slice.stream, step, range);
}

}  // namespace tranche::detail
