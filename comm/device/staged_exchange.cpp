/// Exchanges through host memory, a chunk at a time: device to staging, the host communicator, staging to
/// device. The copies of a chunk run on the communication stream, its exchange on a second one, so that chunk
/// k + 1 is copied to the host and chunk k - 1 to the device while chunk k is exchanged. Between calls the
/// pipeline drains. Each byte crosses the bus twice: a gather costs (N + 1) / N, a reduction 1 + 4 / (N x
/// bytes an element) times the full buffer's bytes. In an all_to_all_v, ranks have different numbers of
/// chunks, and send each other these numbers.
#include <algorithm>
#include <functional>

#include "comm/deterministic_sum.h"
#include "comm/device/host_messages.h"
#include "tranche/core/error.h"
#include "tranche/core/shape.h"

namespace tranche::comm {

namespace {

/// Chunks are a multiple of this many elements where possible, so that copies stay aligned.
constexpr std::int64_t staging_granule = 64;

class StagedExchange : public DeviceExchange {
 public:
  explicit StagedExchange(const DeviceGroup& group)
      : group_(group),
        // The engine makes host calls from another thread; a separate group keeps each sequence in order.
        host_(group.host->split(0, group.rank())),
        slot_bytes_(group.staging_bytes / 2 / memory_alignment * memory_alignment),
        scratch_bytes_(slot_bytes_ / 2 / memory_alignment * memory_alignment),
        staging_(*group.host_memory, 2 * slot_bytes_, Category::communication, "staging"),
        scratch_(*group.device_memory, scratch_bytes_, Category::communication, "staged sums"),
        messages_(group_),
        outlines_(2 * static_cast<std::size_t>(group.size())) {
    const std::int64_t least = staging_granule * 8 * (group.size() + 1);
    if (slot_bytes_ < least || scratch_bytes_ < staging_granule * 4) {
      throw ConfigurationError("a staging buffer of " + std::to_string(group.staging_bytes) +
                               " bytes cannot stage 64 elements for each of " + std::to_string(group.size()) +
                               " ranks; give tranche.communication_slab (staging_bytes in C++) at least " +
                               std::to_string(4 * least));
    }
  }

  bool watched() const override { return false; }  // the host communicator keeps the deadlines

  std::int64_t summed_elements_sent(std::int64_t count, DataType dtype,
                                    const ReductionOptions& options) const override {
    if (count == 0) return 0;
    const std::int64_t chunk = reduction_chunk_of(count, size_of(dtype), options.bucket_elements);
    const auto summed = [&](std::int64_t elements) {
      return elements > 0 ? host_->summed_elements_sent(elements, dtype, options) : 0;
    };
    return count / chunk * summed(chunk) + summed(count % chunk);
  }

  Issued issue(const std::shared_ptr<const DeviceCall>& call, const Event&) override {
    if (call->name == "all_gather") {
      all_gather(call);
    } else if (call->name == "reduce_scatter") {
      reduce_scatter(call);
    } else if (call->name == "broadcast") {
      broadcast(call);
    } else {
      all_to_all(call);
    }
    return {group_.stream->record(), {}, false};
  }

  Issued message(const std::shared_ptr<const DeviceCall>& call, const Event&, Stream& channel) override {
    return messages_.issue(call, channel);
  }

 private:
  /// One chunk of a call: elements [first, first + count) of each rank's part, and its half of the staging
  /// memory.
  struct Chunk {
    std::int64_t first, count;
    unsigned char* staging;
  };
  /// The values that a rank sends to each peer about its all_to_all_v. They travel as int64.
  struct Outline {
    std::int64_t bytes, chunks;
  };
  static constexpr std::int64_t outline_values = sizeof(Outline) / sizeof(std::int64_t);
  using Copies = std::function<void(const Chunk&)>;
  using Exchange = std::function<Event(const Chunk&)>;

  /// The stream is created at the first call, because thread ranks share a GPU's launch queues, and some
  /// groups never call on device memory.
  Stream& exchange_stream() {
    if (!exchange_) exchange_ = group_.device->create_stream("exchange");
    return *exchange_;
  }

  unsigned char* slot(std::int64_t number) const {
    return static_cast<unsigned char*>(staging_.data()) + number % 2 * slot_bytes_;
  }

  /// The number of elements of a chunk whose elements take `bytes` of a slot each. `bucket` limits the
  /// elements of all ranks together.
  std::int64_t chunk_of(std::int64_t count, std::int64_t bytes, std::int64_t bucket) const {
    std::int64_t chunk = slot_bytes_ / bytes;
    if (chunk > staging_granule) chunk -= chunk % staging_granule;
    if (bucket > 0) chunk = std::min(chunk, std::max<std::int64_t>(bucket / group_.size(), 1));
    return std::min(chunk, std::max<std::int64_t>(count, 1));
  }

  /// The chunk of a reduce_scatter: a slot holds all ranks' parts and, aligned, the fp32 sum; the scratch
  /// buffer also holds the sum.
  std::int64_t reduction_chunk_of(std::int64_t count, std::int64_t width, std::int64_t bucket) const {
    const std::int64_t element = width * group_.size() + 4;
    // Aligning the sum takes at most the room of two elements.
    const std::int64_t room = std::min((slot_bytes_ - 8) / element, scratch_bytes_ / 4);
    return std::max<std::int64_t>(std::min(chunk_of(count, element, bucket), room), 1);
  }

  void pipeline(const std::shared_ptr<const DeviceCall>& call, std::int64_t chunk_elements,
                const Copies& download, const Exchange& exchange, const Copies& upload) {
    Stream& stream = *group_.stream;
    Event exchanged;
    Chunk before{0, 0, nullptr};
    const std::int64_t chunks = divide_round_up(call->count, chunk_elements);
    for (std::int64_t number = 0; number < chunks; ++number) {
      const std::int64_t first = number * chunk_elements;
      const Chunk chunk{first, std::min(chunk_elements, call->count - first), slot(number)};
      download(chunk);
      exchange_stream().wait(stream.record());
      // The copies above run after the upload that last read this slot, and the exchange runs after the
      // copies.
      exchange_stream().enqueue(call->name, [this, call, chunk, exchange] {
        run_guarded(group_.failure, *host_, call->what(),
                    [&] { wait_on_host(exchange(chunk), *group_.failure, call->what()); });
      });
      if (number > 0) {
        stream.wait(exchanged);
        upload(before);
      }
      exchanged = exchange_stream().record();
      before = chunk;
    }
    stream.wait(exchanged);
    if (chunks > 0) upload(before);
  }

  void download(void* host, const unsigned char* device, std::int64_t bytes) {
    group_.device->copy_to_host(*group_.stream, host, device, bytes);
  }
  void upload(unsigned char* device, const void* host, std::int64_t bytes) {
    group_.device->copy_from_host(*group_.stream, device, host, bytes);
  }

  void all_gather(const std::shared_ptr<const DeviceCall>& call) {
    const int size = group_.size();
    const std::int64_t width = size_of(call->dtype);
    // The slot holds the data of all ranks; this rank's part is downloaded to its place there.
    const auto own = [=, this](const Chunk& chunk) {
      return chunk.staging + group_.rank() * chunk.count * width;
    };
    if (call->from != call->to_bytes() + group_.rank() * call->bytes()) {
      copy_on_device(*group_.stream, call->to_bytes() + group_.rank() * call->bytes(), call->from,
                     call->count, call->dtype);
    }
    pipeline(
        call, chunk_of(call->count, width * size, call->sum.bucket_elements),
        [=, this](const Chunk& chunk) {
          download(own(chunk), call->from_bytes() + chunk.first * width, chunk.count * width);
        },
        [=, this](const Chunk& chunk) {
          return host_->all_gather(own(chunk), chunk.staging, chunk.count, call->dtype, 0, {}, call->label());
        },
        [=, this](const Chunk& chunk) {
          for (const int peer : group_.peers()) {
            upload(call->to_bytes() + peer * call->bytes() + chunk.first * width,
                   chunk.staging + peer * chunk.count * width, chunk.count * width);
          }
        });
  }

  void reduce_scatter(const std::shared_ptr<const DeviceCall>& call) {
    const int size = group_.size();
    const std::int64_t width = size_of(call->dtype);
    // All ranks' parts come first, then the fp32 sum, aligned.
    const auto sum_of = [=](const Chunk& chunk) {
      return chunk.staging + round_up(chunk.count * width * size, std::int64_t{8});
    };
    // A fold starts from the contents of the output, so they are downloaded too, and the sum replaces them.
    const bool folds = call->sum.accumulate && call->sum.group_size <= 0;
    if (folds && call->output_dtype != DataType::float32) {
      throw InvalidArgument(call->what() + ": a fold through host memory is added up in fp32, not in " +
                            std::string(name_of(call->output_dtype)));
    }
    const bool direct = folds || (!call->sum.accumulate && call->output_dtype == DataType::float32);
    const std::int64_t chunk_elements = reduction_chunk_of(call->count, width, call->sum.bucket_elements);
    ReductionOptions options = call->sum;
    options.accumulate = folds;
    options.bucket_elements = 0;
    pipeline(
        call, chunk_elements,
        [=, this](const Chunk& chunk) {
          for (int member = 0; member < size && group_.rank() < options.givers; ++member) {
            download(chunk.staging + member * chunk.count * width,
                     call->from_bytes() + member * call->bytes() + chunk.first * width, chunk.count * width);
          }
          if (folds) download(sum_of(chunk), call->to_bytes() + chunk.first * 4, chunk.count * 4);
        },
        [=, this](const Chunk& chunk) {
          return host_->reduce_scatter(chunk.staging, call->dtype, sum_of(chunk), DataType::float32,
                                       chunk.count, options, {}, call->label());
        },
        [=, this](const Chunk& chunk) {
          unsigned char* place = call->to_bytes() + chunk.first * size_of(call->output_dtype);
          if (direct) return upload(place, sum_of(chunk), chunk.count * 4);
          // Computes out = out + sum, or out = sum, rounded once, as the deterministic sum of one part.
          upload(static_cast<unsigned char*>(scratch_.data()), sum_of(chunk), chunk.count * 4);
          const void* piece = scratch_.data();
          ReductionOptions added;
          added.accumulate = call->sum.accumulate;
          deterministic_sum(*group_.stream, {&piece, 1}, DataType::float32, added,
                            TensorView{place, call->output_dtype, Shape{chunk.count}});
        });
  }

  void all_to_all(const std::shared_ptr<const DeviceCall>& call) {
    const int rank = group_.rank(), size = group_.size();
    const std::int64_t width = size_of(call->dtype);
    const std::int64_t chunk_elements = chunk_of(call->count, 2 * width * size, 0);
    // All ranks have the same number of chunks in an all_to_all.
    const bool equal = call->name == "all_to_all";
    const std::int64_t chunks = divide_round_up(call->count, chunk_elements);
    const auto received = [=](const Chunk& chunk) { return chunk.staging + size * chunk.count * width; };
    // A chunk carries this range of each rank's part; each rank has a place in the slot.
    const auto portions = [=](const Chunk& chunk, const std::vector<RankElements>& parts) {
      std::vector<RankElements> result;
      for (int r = 0; r < size; ++r) {
        const std::int64_t left = r == rank ? 0 : parts[static_cast<std::size_t>(r)].count - chunk.first;
        result.push_back({r * chunk.count, std::clamp<std::int64_t>(left, 0, chunk.count)});
      }
      return result;
    };
    copy_own_part(*group_.stream, *call, rank);
    if (!equal) {
      exchange_stream().enqueue(call->name, [this, call, chunks] {
        run_guarded(group_.failure, *host_, call->what(), [&] { exchange_outlines(*call, chunks); });
      });
    }
    pipeline(
        call, chunk_elements,
        [=, this](const Chunk& chunk) {
          const std::vector<RankElements> of = portions(chunk, call->sends);
          for (const int peer : group_.peers()) {
            const RankElements& part = of[static_cast<std::size_t>(peer)];
            if (part.count == 0) continue;
            download(chunk.staging + part.first * width, call->place_sent_to(peer) + chunk.first * width,
                     part.count * width);
          }
        },
        [=, this](const Chunk& chunk) {
          if (equal) {
            return host_->all_to_all(chunk.staging, received(chunk), chunk.count, call->dtype, {},
                                     call->label());
          }
          return host_->all_to_all_v(chunk.staging, portions(chunk, call->sends), received(chunk),
                                     portions(chunk, call->receives), call->dtype, {}, call->label());
        },
        [=, this](const Chunk& chunk) {
          const std::vector<RankElements> of = portions(chunk, call->receives);
          for (const int peer : group_.peers()) {
            const RankElements& part = of[static_cast<std::size_t>(peer)];
            if (part.count == 0) continue;
            upload(call->place_received_from(peer) + chunk.first * width,
                   received(chunk) + part.first * width, part.count * width);
          }
        });
    if (equal) return;
    exchange_stream().enqueue(call->name, [this, call, chunks] {
      run_guarded(group_.failure, *host_, call->what(), [&] { call_as_often_as_peers(*call, chunks); });
    });
    // A rank without chunks must still tell its peers that it has none.
    group_.stream->wait(exchange_stream().record());
  }

  /// Sends each peer of an all_to_all_v the number of bytes that it receives and of this rank's chunks.
  void exchange_outlines(const DeviceCall& call, std::int64_t chunks) {
    std::vector<RankElements> parts;
    for (int r = 0; r < group_.size(); ++r) {
      parts.push_back({outline_values * r, outline_values});
      outlines_[static_cast<std::size_t>(r)] = {call.bytes_to(r), chunks};
    }
    Outline* const received = outlines_.data() + group_.size();
    wait_on_host(
        host_->all_to_all_v(outlines_.data(), parts, received, parts, DataType::int64, {}, call.label()),
        *group_.failure, call.what());
    most_chunks_ = chunks;
    for (const int peer : group_.peers()) {
      require_equal_bytes(group_, call, peer, received[peer].bytes, group_.rank(), call.bytes_from(peer));
      most_chunks_ = std::max(most_chunks_, received[peer].chunks);
    }
  }

  /// The host communicator numbers calls, so a rank with fewer chunks than another makes further calls
  /// without data.
  void call_as_often_as_peers(const DeviceCall& call, std::int64_t chunks) {
    const std::vector<RankElements> nothing(static_cast<std::size_t>(group_.size()));
    for (; chunks < most_chunks_; ++chunks) {
      wait_on_host(host_->all_to_all_v(nullptr, nothing, nullptr, nothing, call.dtype, {}, call.label()),
                   *group_.failure, call.what());
    }
  }

  void broadcast(const std::shared_ptr<const DeviceCall>& call) {
    const std::int64_t width = size_of(call->dtype);
    const bool root = group_.rank() == call->other;
    pipeline(
        call, chunk_of(call->count, width, 0),
        [=, this](const Chunk& chunk) {
          if (root) download(chunk.staging, call->from_bytes() + chunk.first * width, chunk.count * width);
        },
        [=, this](const Chunk& chunk) {
          return host_->broadcast(chunk.staging, chunk.count, call->dtype, call->other, {}, call->label());
        },
        [=, this](const Chunk& chunk) {
          if (!root) upload(call->to_bytes() + chunk.first * width, chunk.staging, chunk.count * width);
        });
  }

  DeviceGroup group_;
  std::unique_ptr<Communicator> host_;
  std::int64_t slot_bytes_, scratch_bytes_;
  Buffer staging_, scratch_;
  HostMessages messages_;
  // Used only on the exchange's stream.
  std::vector<Outline> outlines_;     ///< sent to all ranks, received from them
  std::int64_t most_chunks_ = 0;      ///< that any rank has of the all_to_all_v under way
  std::unique_ptr<Stream> exchange_;  // last, because its work uses all members above
};

}  // namespace

std::unique_ptr<DeviceExchange> make_staged_exchange(const DeviceGroup& group) {
  if (group.line) return make_host_line(group);
  return std::make_unique<StagedExchange>(group);
}

}  // namespace tranche::comm
