#include "comm/device_communicator.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <random>
#include <utility>

#include <fmt/format.h>

#include "comm/communicator_base.h"
#include "comm/device/device_exchange.h"
#include "comm/device/device_watch.h"
#include "comm/nccl/nccl_exchange.h"
#include "comm/peer_inquiry.h"
#include "comm/transport/operation.h"
#include "core/clock.h"
#include "tranche/core/error.h"
#include "tranche/device/cuda_interop.h"

namespace tranche::comm {

namespace {

constexpr OperationLabel start_label{"", "start", Traffic::control, Tier::host};

class DeviceCommunicator : public CommunicatorBase {
 public:
  /// `options.transport` is already chosen. `line`: for messages between neighbours only.
  DeviceCommunicator(Device& device, std::unique_ptr<Communicator> host,
                     const DeviceCommunicatorOptions& options, std::vector<int> job_ranks, bool line = false)
      : device_(device),
        options_(options),
        host_(std::move(host)),
        inquiry_(dynamic_cast<PeerInquiry*>(host_.get())),
        failure_(std::make_shared<DeviceFailure>(job_ranks[static_cast<std::size_t>(host_->rank())],
                                                 options.rank_names)),
        exceptions_(std::uncaught_exceptions()) {
    if (!line) stream_ = make_stream("communication");
    group_.device = &device_;
    group_.stream = stream_.get();
    group_.line = line;
    group_.host = host_.get();
    group_.failure = failure_;
    group_.job_ranks = std::move(job_ranks);
    group_.timeout_seconds = options_.timeout_seconds;
    group_.staging_bytes = options_.staging_bytes;
    group_.device_memory = options_.device_memory;
    group_.host_memory = options_.host_memory;
    switch (options_.transport) {
      case DeviceTransport::nccl:
        exchange_ = make_nccl_exchange(group_, options_.library_collectives);
        name_ = fmt::format("nccl over {}", host_->backend());
        break;
      case DeviceTransport::staged:
        exchange_ = make_staged_exchange(group_);
        name_ = fmt::format("staged over {}", host_->backend());
        break;
      default:
        exchange_ = make_shared_exchange(group_);
        name_ = size() == 1 ? "self" : fmt::format("shared {}", host_->backend());
    }
    for (const int peer : group_.neighbours()) make_channels(peer);
    if (size() == 1 && options_.transport != DeviceTransport::nccl) return;
    watch_ = std::make_unique<DeviceWatch>(
        failure_, exchange_->watched() ? options_.timeout_seconds : 0,
        [this] {
          host_->check_health();
          exchange_->check();
        },
        [this] { exchange_->abort(); });
  }

  ~DeviceCommunicator() override {
    if (std::uncaught_exceptions() == exceptions_) {
      const double limit = detail::seconds_now() + options_.timeout_seconds;
      for (const Event& event : pending_) wait_quietly(event, limit - detail::seconds_now());
      const bool done =
          std::all_of(pending_.begin(), pending_.end(), [](const Event& e) { return e.query(); });
      if (done && !failure_->failed()) {
        watch_.reset();
        if (!failure_->failed()) exchange_->close();
      }
    }
    failure_->end("its communicator was destroyed before it was done");
    watch_.reset();
    // Enqueued work uses the exchange's memory; the failure above makes it end.
    try {
      if (stream_) wait_quietly(stream_->record(), 2.0);
    } catch (...) {
      // A failed device runs nothing that could still use it.
    }
    channels_.clear();
    exchange_.reset();
  }

  int rank() const override { return host_->rank(); }
  int size() const override { return host_->size(); }
  std::string_view backend() const override { return name_; }
  int local_size() const override { return host_->local_size(); }
  int local_rank() const override { return host_->local_rank(); }
  int node_of(int rank) const override { return host_->node_of(rank); }

  Event all_gather(const void* shard, void* full, std::int64_t count, DataType dtype,
                   std::int64_t bucket_elements, std::span<const Event> ready,
                   const OperationLabel& label) override {
    open("all_gather", label);
    validate_and_record_all_gather(shard, full, count, dtype, bucket_elements, label);
    if (on_host(label)) return host_->all_gather(shard, full, count, dtype, bucket_elements, ready, label);
    DeviceCall call = call_of("all_gather", shard, full, count, dtype, label);
    call.sum.bucket_elements = bucket_elements;
    return enqueue(std::move(call), ready);
  }

  Event reduce_scatter(const void* full, DataType dtype, void* output, DataType output_dtype,
                       std::int64_t count, const ReductionOptions& options, std::span<const Event> ready,
                       const OperationLabel& label) override {
    open("reduce_scatter", label);
    validate_and_record_reduce_scatter(full, dtype, output, output_dtype, count, options, label);
    if (on_host(label)) {
      return host_->reduce_scatter(full, dtype, output, output_dtype, count, options, ready, label);
    }
    DeviceCall call = call_of("reduce_scatter", full, output, count, dtype, label);
    call.output_dtype = output_dtype;
    call.sum = options;
    return enqueue(std::move(call), ready);
  }

  std::int64_t summed_elements_sent(std::int64_t count, DataType dtype,
                                    const ReductionOptions& options) const override {
    return exchange_->summed_elements_sent(count, dtype, options);
  }

  Event all_reduce(void* values, std::int64_t count, DataType dtype, ReduceOperation operation,
                   const OperationLabel& label) override {
    open("all_reduce", label);
    validate_and_record_all_reduce(values, count, dtype, label);
    return host_->all_reduce(values, count, dtype, operation, label);
  }

  Event all_to_all(const void* sent, void* received, std::int64_t count, DataType dtype,
                   std::span<const Event> ready, const OperationLabel& label) override {
    open("all_to_all", label);
    validate_and_record_all_to_all(sent, received, count, dtype, label);
    if (on_host(label)) return host_->all_to_all(sent, received, count, dtype, ready, label);
    DeviceCall call = call_of("all_to_all", sent, received, count, dtype, label);
    for (int r = 0; r < size(); ++r) call.sends.push_back({r * count, count});
    call.receives = call.sends;
    return enqueue(std::move(call), ready);
  }

  Event all_to_all_v(const void* sent, std::span<const RankElements> sends, void* received,
                     std::span<const RankElements> receives, DataType dtype, std::span<const Event> ready,
                     const OperationLabel& label) override {
    open("all_to_all_v", label);
    validate_and_record_all_to_all_v(sent, sends, received, receives, dtype, label);
    if (on_host(label)) return host_->all_to_all_v(sent, sends, received, receives, dtype, ready, label);
    std::int64_t most = 0;
    for (const int peer : group_.peers()) {
      const auto at = static_cast<std::size_t>(peer);
      most = std::max({most, sends[at].count, receives[at].count});
    }
    DeviceCall call = call_of("all_to_all_v", sent, received, most, dtype, label);
    call.sends.assign(sends.begin(), sends.end());
    call.receives.assign(receives.begin(), receives.end());
    return enqueue(std::move(call), ready);
  }

  Event broadcast(void* values, std::int64_t count, DataType dtype, int root, std::span<const Event> ready,
                  const OperationLabel& label) override {
    open("broadcast", label);
    validate_and_record_broadcast(values, count, dtype, root, label);
    if (on_host(label)) return host_->broadcast(values, count, dtype, root, ready, label);
    return enqueue(call_of("broadcast", values, values, count, dtype, label, root), ready);
  }

  Event send(const void* values, std::int64_t count, DataType dtype, int peer, std::span<const Event> ready,
             const OperationLabel& label) override {
    open("send", label);
    if (!on_host(label)) require_neighbour("send", peer, label);
    validate_and_record_send(values, count, dtype, peer, label);
    if (on_host(label)) return host_->send(values, count, dtype, peer, ready, label);
    return enqueue_message(call_of("send", values, nullptr, count, dtype, label, peer), ready);
  }

  Event recv(void* values, std::int64_t count, DataType dtype, int peer, std::span<const Event> ready,
             const OperationLabel& label) override {
    open("recv", label);
    if (!on_host(label)) require_neighbour("recv", peer, label);
    validate_and_record_recv(values, count, dtype, peer, label);
    if (on_host(label)) return host_->recv(values, count, dtype, peer, ready, label);
    return enqueue_message(call_of("recv", nullptr, values, count, dtype, label, peer), ready);
  }

  Event barrier(const OperationLabel& label) override {
    open("barrier", label);
    validate_and_record_barrier(label);
    return host_->barrier(label);
  }

  std::unique_ptr<Communicator> split(int color, int key) override {
    open("split", {});
    validate_and_record_split();
    return part(host_->split(color, key), false);
  }

  std::unique_ptr<Communicator> line(std::span<const int> ranks) override {
    open("split", {});
    validate_and_record_split();
    return part(host_->subgroup(ranks), true);
  }

  void join_ends() override {
    if (!group_.line) throw LogicError("join_ends() of a group that is no line");
    if (std::exchange(group_.ring, true) || group_.other_end() < 0) return;
    open("join_ends", {});
    exchange_->connect(group_.other_end());
    make_channels(group_.other_end());
  }

  void post_failure(std::string_view cause, ExitStatus status, double seconds) noexcept override {
    host_->post_failure(cause, status, seconds);
  }
  void post_unwinding(std::string_view where, double seconds) noexcept override {
    host_->post_unwinding(where, seconds);
  }
  void check_health() override {
    adopt_host_failure();
    failure_->check({});
  }
  void abort_job(int status) noexcept override { host_->abort_job(status); }

 private:
  static void wait_quietly(const Event& event, double seconds) noexcept {
    try {
      event.wait_for(std::max(0.0, seconds));
    } catch (...) {
      // The waiter on the event itself gets the error.
    }
  }

  /// The device communicator over a part of the ranks; `host` is their host communicator.
  std::unique_ptr<Communicator> part(std::unique_ptr<Communicator> host, bool line) {
    if (!host) return nullptr;
    std::vector<std::int64_t> ranks(static_cast<std::size_t>(host->size()));
    const std::int64_t mine = group_.job_rank(rank());
    host->all_gather(&mine, ranks.data(), 1, DataType::int64, 0, {}, start_label).wait();
    DeviceCommunicatorOptions options = options_;
    if (host->size() == 1 && options.transport == DeviceTransport::staged) {
      options.transport = DeviceTransport::shared;
    }
    return std::make_unique<DeviceCommunicator>(device_, std::move(host), options,
                                                std::vector<int>(ranks.begin(), ranks.end()), line);
  }

  std::unique_ptr<Stream> make_stream(std::string name) {
    std::unique_ptr<Stream> stream = device_.create_stream(std::move(name));
    stream->set_trace(options_.trace);
    return stream;
  }

  /// The stream for messages to a peer, or from it. They wait for no other messages.
  Stream& channel(int peer, bool sending) {
    std::unique_ptr<Stream>& stream = channels_[{peer, sending}];
    if (!stream) {
      stream =
          make_stream(fmt::format("messages {} rank {}", sending ? "to" : "from", group_.job_rank(peer)));
    }
    return *stream;
  }

  void make_channels(int peer) {
    for (const bool sending : {false, true}) (void)channel(peer, sending);
  }

  static bool on_host(const OperationLabel& label) { return label.memory == Tier::host; }

  /// Records the failure that ended the host communicator.
  void adopt_host_failure() {
    try {
      host_->check_health();
    } catch (...) {
      failure_->fail({}, std::current_exception());
    }
  }

  void open(std::string_view name, const OperationLabel& label) {
    adopt_host_failure();
    if (failure_->failed()) failure_->check(describe(name, label.unit, label.phase));
  }

  static DeviceCall call_of(std::string_view name, const void* from, void* to, std::int64_t count,
                            DataType dtype, const OperationLabel& label, int other = 0) {
    DeviceCall call;
    call.name = name;
    call.unit = label.unit;
    call.phase = label.phase;
    call.from = from;
    call.to = to;
    call.count = count;
    call.dtype = dtype;
    call.other = other;
    return call;
  }

  /// Throws if a peer of the group is no neighbour on a line. A peer outside the group is refused later, with
  /// the call's other arguments.
  void require_neighbour(std::string_view name, int peer, const OperationLabel& label) const {
    if (!group_.line || peer < 0 || peer >= size()) return;
    const std::vector<int> neighbours = group_.neighbours();
    if (std::find(neighbours.begin(), neighbours.end(), peer) != neighbours.end()) return;
    throw InvalidArgument(fmt::format("{}: rank {} is no neighbour of rank {} on a line of {} ranks",
                                      describe(name, label.unit, label.phase), peer, rank(), size()));
  }

  /// A send waits only for its `ready` events and for earlier sends to that peer, and a recv likewise: a rank
  /// that must receive before its peers can continue never delays its own sends to them.
  Event enqueue_message(DeviceCall&& call, std::span<const Event> ready) {
    Stream& stream = channel(call.other, call.name == "send");
    return follow(std::make_shared<const DeviceCall>(std::move(call)), ready, stream,
                  [&](const std::shared_ptr<const DeviceCall>& made, const Event& started) {
                    return exchange_->message(made, started, stream);
                  });
  }

  Event enqueue(DeviceCall&& the_call, std::span<const Event> ready) {
    // A line has only messages: issue() throws for any other call.
    if (group_.line) (void)exchange_->issue(std::make_shared<const DeviceCall>(the_call), {});
    if (inquiry_ != nullptr) {
      const std::uint64_t number = calls_++;
      inquiry_->note_device_call(the_call.name, the_call.unit, number);
      the_call.ask = [inquiry = inquiry_, name = the_call.name, unit = the_call.unit, number] {
        inquiry->ask_peers(name, unit, number);
      };
    }
    const auto call = std::make_shared<const DeviceCall>(std::move(the_call));
    return follow(call, ready, *stream_,
                  [this](const std::shared_ptr<const DeviceCall>& made, const Event& started) {
                    return exchange_->issue(made, started);
                  });
  }

  /// Issues a call on a stream, after the `ready` events.
  template <typename Issue>
  Event follow(const std::shared_ptr<const DeviceCall>& call, std::span<const Event> ready, Stream& stream,
               Issue&& issue) {
    const std::string what = call->what();
    for (const Event& event : ready) {
      if (event.state()) stream.wait(Event(std::make_shared<GuardedEvent>(event, failure_, what, -1)));
    }
    const Event started = stream.record();
    Issued issued;
    try {
      issued = issue(call, started);
    } catch (Error& error) {
      // A partly issued call cannot be undone: later calls of this rank would not match its peers'.
      error.attach_rank(failure_->rank());
      failure_->fail(what, std::current_exception());
      throw;
    }
    auto done = std::make_shared<GuardedEvent>(std::move(issued.done), failure_, what, started,
                                               std::move(issued.peers), issued.abortable);
    Event event(done);
    if (watch_) watch_->add({std::move(done), issued.sending, issued.awaited, call->ask});
    std::erase_if(pending_, [](const Event& each) { return each.query(); });
    pending_.push_back(event);
    return event;
  }

  Device& device_;
  DeviceCommunicatorOptions options_;
  std::unique_ptr<Communicator> host_;
  PeerInquiry* inquiry_;     ///< `host_` as an interface for inquiries; may be null
  std::uint64_t calls_ = 0;  ///< collective calls issued on the device
  std::shared_ptr<DeviceFailure> failure_;
  int exceptions_;  ///< exceptions in flight at construction; more at destruction means unwinding
  std::string name_;
  std::unique_ptr<Stream> stream_;  ///< null on a line
  DeviceGroup group_;
  std::unique_ptr<DeviceExchange> exchange_;
  std::map<std::pair<int, bool>, std::unique_ptr<Stream>> channels_;  ///< by peer and direction
  std::unique_ptr<DeviceWatch> watch_;
  std::vector<Event> pending_;
};

/// A number that no other process has, drawn at random once.
std::uint64_t process_number() {
  static const std::uint64_t number = [] {
    std::random_device random;
    return static_cast<std::uint64_t>(random()) << 32 | random();
  }();
  return number;
}

/// A place in the form in which it is sent: fixed size, equal on every node.
struct PackedPlace {
  std::uint64_t process;
  std::int64_t index;
  char node[64], nccl_node[64], gpu[32];
};

template <std::size_t size>
void pack(char (&to)[size], const std::string& from) {
  std::memset(to, 0, size);
  from.copy(to, size - 1);
}

std::vector<DevicePlace> gather_places(const Device& device, Communicator& host) {
  char name[64] = "";
  gethostname(name, sizeof(name) - 1);
  const char* id = std::getenv("NCCL_HOSTID");
  PackedPlace mine{};
  mine.process = process_number();
  mine.index = device.index();
  pack(mine.node, name);
  pack(mine.nccl_node, id != nullptr ? std::string("NCCL_HOSTID ") + id : name);
  std::string gpu = nccl_gpu_of(device);
  if (gpu.empty() && device.kind() == DeviceKind::cuda) gpu = fmt::format("number {}", cuda_ordinal(device));
  pack(mine.gpu, gpu);
  std::vector<PackedPlace> all(static_cast<std::size_t>(host.size()));
  host.all_gather(&mine, all.data(), sizeof(PackedPlace), DataType::uint8, 0, {}, start_label).wait();
  std::vector<DevicePlace> places;
  for (const PackedPlace& each : all) {
    places.push_back({each.process, each.node, each.nccl_node, each.gpu, static_cast<int>(each.index)});
  }
  return places;
}

}  // namespace

std::unique_ptr<Communicator> make_device_communicator(Device& device, std::unique_ptr<Communicator> host,
                                                       const DeviceCommunicatorOptions& options) {
  if (options.inline_progress && host->size() > 1) {
    throw ConfigurationError(
        "tranche.progress: inline moves communication only inside calls, and a device's work goes on without "
        "them; "
        "initialise MPI with MPI_THREAD_MULTIPLE and leave the key out");
  }
  DeviceCommunicatorOptions chosen = options;
  const std::vector<DevicePlace> places = gather_places(device, *host);
  chosen.transport = choose_transport(options.transport, places, has_nccl());
  if (host->size() == 1 && chosen.transport == DeviceTransport::staged) {
    chosen.transport = DeviceTransport::shared;  // a single rank needs no host memory
  }
  if (options.library_collectives && chosen.transport != DeviceTransport::nccl) {
    throw ConfigurationError(
        fmt::format("tranche.collectives: nccl needs tranche.device_transport nccl, but these ranks use {}; "
                    "leave the key out, "
                    "or start one rank a GPU",
                    name_of(chosen.transport)));
  }
  if (chosen.device_memory == nullptr) chosen.device_memory = &device.memory(Tier::device);
  if (chosen.host_memory == nullptr) chosen.host_memory = &device.memory(Tier::host);
  std::vector<int> ranks(static_cast<std::size_t>(host->size()));
  for (std::size_t i = 0; i < ranks.size(); ++i) ranks[i] = static_cast<int>(i);
  return std::make_unique<DeviceCommunicator>(device, std::move(host), chosen, std::move(ranks));
}

}  // namespace tranche::comm
