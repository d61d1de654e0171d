#include "engine/piece_statistics.h"

#include <cstddef>

#include "tranche/kernels/reduction.h"

namespace tranche::detail {

std::int64_t PieceStatistics::sent_elements(const FlatBuffer& flat) {
  return flat.layout.padded_elements() / flat.sharers * (flat.sharers - 1);
}

void PieceStatistics::take(const FlatBuffer& flat, const ConstTensorView& gradient,
                           std::int64_t piece) const {
  if (!scalars_.has_pieces()) return;
  kernels::GradientStatistics* const statistics = scalars_.of_piece(piece) + flat.trainable_index;
  if (flat.sharers == 1) return kernels::gradient_statistics(compute_, gradient, statistics);
  // A buffer consists of whole shards of each rank that shares it, so shares are equal.
  const auto sharers = static_cast<std::size_t>(flat.sharers);
  const std::int64_t share = gradient.elements() / flat.sharers;
  const std::size_t first = static_cast<std::size_t>(tensor_->rank()) / sharers * sharers;
  std::vector<RankElements> sends(static_cast<std::size_t>(tensor_->size()));
  std::vector<RankElements> receives = sends;
  StepBuffer memory = arena_.acquire(gradient.elements() * size_of(gradient.dtype), Category::communication,
                                     flat.name + " parts of a gradient");
  std::vector<const void*> parts;
  for (std::size_t i = 0; i < sharers; ++i) {
    sends[first + i] = {static_cast<std::int64_t>(i) * share, share};
    receives[first + i] = sends[first + i];
    parts.push_back(static_cast<const std::byte*>(memory.data()) +
                    static_cast<std::int64_t>(i) * share * size_of(gradient.dtype));
  }
  std::vector<Event> ready{compute_.record()};
  ready.insert(ready.end(), memory.ready().begin(), memory.ready().end());
  compute_.wait(tensor_->all_to_all_v(gradient.data, sends, memory.data(), receives, gradient.dtype, ready,
                                      {flat.name, "noise", Traffic::data}));
  const TensorView sum{memory.data(), gradient.dtype, Shape{share}};
  kernels::ordered_sum(compute_, parts, gradient.dtype, flat.sharers, false, sum);
  kernels::gradient_statistics(compute_, sum, statistics);
  memory.release(compute_.record());
}

std::vector<SquareSum> PieceStatistics::sums(Device& device, std::span<FlatBuffer* const> trainable,
                                             std::int64_t pieces) const {
  const std::size_t count = trainable.size();
  std::vector<kernels::GradientStatistics> statistics(static_cast<std::size_t>(pieces) * count);
  device.copy_to_host(compute_, statistics.data(), scalars_.of_piece(0),
                      static_cast<std::int64_t>(statistics.size() * sizeof(kernels::GradientStatistics)));
  compute_.synchronize();
  std::vector<SquareSum> sums(static_cast<std::size_t>(pieces));
  for (std::size_t i = 0; i < statistics.size(); ++i) {
    if (trainable[i % count]->empty()) continue;  // it is never reduced
    SquareSum& sum = sums[i / count];
    sum += statistics[i].squares;
    if (statistics[i].first_non_finite >= 0) sum.add_infinity();
  }
  if (tensor_ == nullptr) return sums;
  // Nothing is received from simulated peers (a plan).
  const std::size_t ranks = tensor_->simulated() ? 1 : static_cast<std::size_t>(tensor_->size());
  std::vector<SquareSum> received(ranks * sums.size());
  tensor_
      ->all_gather(sums.data(), received.data(), static_cast<std::int64_t>(sums.size() * sizeof(SquareSum)),
                   DataType::uint8, 0, {}, OperationLabel{"step", "noise", Traffic::control, Tier::host})
      .wait();
  if (tensor_->simulated()) return sums;
  sums.assign(sums.size(), {});
  for (std::size_t i = 0; i < received.size(); ++i) sums[i % sums.size()] += received[i];
  return sums;
}

}  // namespace tranche::detail
