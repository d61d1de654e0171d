#include "comm/transport/mpi_transport.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <deque>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include "comm/call_signature.h"
#include "comm/node/futex_wake_event.h"
#include "comm/node/mpi_window.h"
#include "comm/transport/message_pieces.h"
#include "core/clock.h"
#include "tranche/core/error.h"

namespace tranche::comm {

void require_mpi(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw CommunicationError(fmt::format("{}: {}", call, std::string(text, static_cast<std::size_t>(length))));
}

namespace {

using detail::seconds_now;

// A tag has 30 bits: 8 of context, 1 for point to point, 21 of sequence, of which a collective uses 9 for its
// hash. Messages with equal tags match in order, so a number may be reused once 4096 later collectives have
// been issued: an operation and those of its unit wait for each other, and are never that far apart. If
// hashes are equal by chance, the sequence hash, compared at every step's end, detects that calls differ.
constexpr int sequence_bits = 21, call_bits = 9, context_bits = 8;
static_assert(failure_tag == 1 << (sequence_bits + 1 + context_bits));
/// The longest time for reporting a failure at the end; a rank needs less, and longer would be noticed.
constexpr double longest_parting_seconds = 1;

int pack(const Tag& tag) {
  if (tag.context >= 1 << context_bits) {
    throw CommunicationError(
        fmt::format("more than {} communicators have been split off", (1 << context_bits) - 1));
  }
  constexpr std::uint64_t mask = (1u << sequence_bits) - 1;
  const std::uint64_t call = (tag.call ^ (tag.call >> 16)) & ((1u << call_bits) - 1);
  const auto sequence =
      static_cast<int>(tag.point_to_point ? tag.sequence & mask : (tag.sequence << call_bits | call) & mask);
  return (tag.context << (sequence_bits + 1)) | (tag.point_to_point ? 1 << sequence_bits : 0) | sequence;
}

class MpiMessage : public Message {
 public:
  MpiMessage(MPI_Request request, std::int64_t bytes, int self, int peer, bool sending,
             const RankNames& names)
      : request_(request), bytes_(bytes), self_(self), peer_(peer), sending_(sending), names_(names) {}

  ~MpiMessage() override {
    if (request_ == MPI_REQUEST_NULL) return;
    if (!sending_) {
      // An unmatched receive is cancelled at once. A matched one gets a moment to end, because its data would
      // otherwise arrive in memory that is no longer ours.
      MPI_Cancel(&request_);
      int done = 0;
      for (int tries = 0; tries < 1000; ++tries) {
        MPI_Test(&request_, &done, MPI_STATUS_IGNORE);
        if (done != 0) return;
        std::this_thread::sleep_for(std::chrono::microseconds(10));
      }
    }
    MPI_Request_free(&request_);
  }

  bool test() override {
    int done = 0;
    MPI_Status status;
    const int code = MPI_Test(&request_, &done, &status);
    if (code != MPI_SUCCESS) {
      int kind = MPI_SUCCESS;
      MPI_Error_class(code, &kind);
      if (kind == MPI_ERR_TRUNCATE) refuse("more");
      require_mpi(code, "MPI_Test");
    }
    if (done == 0) return false;
    if (!sending_) {
      int received = 0;
      MPI_Get_count(&status, MPI_BYTE, &received);
      if (received != bytes_) refuse(fmt::format("{} bytes", received));
    }
    return true;
  }

 private:
  [[noreturn]] void refuse(const std::string& sent) const {
    throw CommunicationError(fmt::format("{} sent {} where {} expects {} bytes: the ranks' calls differ",
                                         names_.of(peer_), sent, names_.of(self_), bytes_));
  }
  MPI_Request request_;
  std::int64_t bytes_;
  int self_, peer_;
  bool sending_;
  const RankNames& names_;
};

/// A message divided into pieces. It is done when all of them are.
class MessageInPieces : public Message {
 public:
  void add(std::unique_ptr<Message> piece) { pieces_.push_back(std::move(piece)); }
  bool test() override {
    while (done_ < pieces_.size() && pieces_[done_]->test()) ++done_;
    return done_ == pieces_.size();
  }

 private:
  std::vector<std::unique_ptr<Message>> pieces_;
  std::size_t done_ = 0;
};

/// The header before the text of a report.
struct ReportHead {
  int rank, status, cause_follows, ended;
};

/// A signature whose send may still be pending.
struct SentSignature {
  CallSignature signature;
  MPI_Request request;
};

/// A report that is being sent to all peers.
struct OutgoingReport {
  std::string text;
  std::vector<MPI_Request> posts;
};

class MpiTransport : public Transport {
 public:
  MpiTransport(MPI_Comm communicator, std::shared_ptr<bool> clean_end, WindowMemory* window, int local_size)
      : comm_(communicator), clean_end_(std::move(clean_end)), local_size_(local_size) {
    require_mpi(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &size_);
    void* bound = nullptr;
    int found = 0;
    // This attribute is attached to the world only, not to communicators split from it.
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, static_cast<void*>(&bound), &found);
    if (found == 0 || *static_cast<int*>(bound) < parting_tag) {
      throw CommunicationError(fmt::format("this MPI has tags up to {} only; {} are needed",
                                           found == 0 ? 0 : *static_cast<int*>(bound), parting_tag));
    }
    find_nodes(window);
    listen();
    listen_for_signatures();
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string_view backend() const override { return "mpi"; }
  int node_of(int rank) const override { return nodes_[static_cast<std::size_t>(rank)]; }
  bool needs_polling() const override { return true; }

  bool reads(int peer) const override { return window_->reads(peer); }
  std::string window_obstacle() const override { return window_->obstacle(); }
  std::optional<MemoryRegistration> register_memory(const void* data, std::int64_t bytes) override {
    if (window_->own() == nullptr) return std::nullopt;
    const auto place = window_->own()->find(data, bytes);
    if (!place) return std::nullopt;
    return MemoryRegistration{place->allocation, place->bytes, place->offset};
  }
  const void* map_peer(int peer, const MemoryRegistration& registration) override {
    return window_->map_peer(peer, registration);
  }

  std::shared_ptr<WakeEvent> wake_event() override {
    // A rank alone on its node needs no window, so a missing one is not an obstacle.
    const WindowMemory* own = window_->own();
    if (own == nullptr || !own->available() || !window_->obstacle().empty()) return nullptr;
    return std::make_shared<FutexWakeEvent>(*own->control_segment());
  }
  void notify() noexcept override {
    if (window_->own() != nullptr && window_->own()->available()) window_->own()->control_segment()->notify();
  }

  std::unique_ptr<Message> send(const void* data, std::int64_t bytes, int peer, const Tag& tag) override {
    auto message = post(bytes, peer, tag, true, [&](std::int64_t first, int count, MPI_Request* request) {
      const auto* from = static_cast<const unsigned char*>(data) + first;
      require_mpi(MPI_Isend(from, count, MPI_BYTE, peer, pack(tag), comm_, request), "MPI_Isend");
    });
    if (window_->reads(peer)) window_->segment(peer).notify();
    return message;
  }
  std::unique_ptr<Message> receive(void* data, std::int64_t bytes, int peer, const Tag& tag) override {
    return post(bytes, peer, tag, false, [&](std::int64_t first, int count, MPI_Request* request) {
      auto* to = static_cast<unsigned char*>(data) + first;
      require_mpi(MPI_Irecv(to, count, MPI_BYTE, peer, pack(tag), comm_, request), "MPI_Irecv");
    });
  }

  std::optional<FailureReport> poll_failure() override {
    if (listening_ == MPI_REQUEST_NULL) return failure_;
    // Each poll of MPI yields the core if there are more ranks than cores.
    const double now = seconds_now();
    if (now < next_poll_) return failure_;
    next_poll_ = now + 100e-6;
    std::array<MPI_Request, 2> requests{listening_, signature_request_};
    int done = 0, which = MPI_UNDEFINED;
    MPI_Status status;
    if (MPI_Testany(2, requests.data(), &which, &done, &status) != MPI_SUCCESS || done == 0 ||
        which == MPI_UNDEFINED) {
      return failure_;
    }
    if (which == 1) {
      signatures_.push_back(heard_signature_);
      listen_for_signatures();
      return failure_;
    }
    listening_ = requests[0];
    int bytes = 0;
    MPI_Get_count(&status, MPI_BYTE, &bytes);
    FailureReport report{status.MPI_SOURCE, std::string(heard_.data(), static_cast<std::size_t>(bytes))};
    ReportHead head{};
    if (report.cause.size() >= sizeof(head)) {
      std::memcpy(&head, report.cause.data(), sizeof(head));
      report.cause.erase(0, sizeof(head));
      report.rank = head.rank;
      report.status = static_cast<ExitStatus>(head.status);
      report.cause_follows = head.cause_follows != 0;
      report.ended = head.ended != 0;
    }
    if (report.cause_follows) listen();
    return failure_ = std::move(report);
  }

  bool post_failure(const FailureReport& report) override {
    OutgoingReport& outgoing = outgoing_[report.cause_follows ? 0 : 1];
    if (outgoing.posts.empty()) {
      const ReportHead head{report.rank, static_cast<int>(report.status), report.cause_follows ? 1 : 0,
                            report.ended ? 1 : 0};
      outgoing.text.assign(reinterpret_cast<const char*>(&head), sizeof(head));
      outgoing.text += report.cause.substr(0, heard_.size() - outgoing.text.size());
      for (int peer = 0; peer < size_; ++peer) {
        if (peer == rank_) continue;
        outgoing.posts.push_back(MPI_REQUEST_NULL);
        MPI_Isend(outgoing.text.data(), static_cast<int>(outgoing.text.size()), MPI_BYTE, peer, failure_tag,
                  comm_, &outgoing.posts.back());
      }
    }
    int done = 1;
    MPI_Testall(static_cast<int>(outgoing.posts.size()), outgoing.posts.data(), &done, MPI_STATUSES_IGNORE);
    return done != 0;
  }

  void send_signature(const CallSignature& signature, int peer) override {
    // Signatures are small enough to be sent eagerly, and few enough to be kept.
    SentSignature& sent = sent_signatures_.emplace_back(SentSignature{signature, MPI_REQUEST_NULL});
    require_mpi(MPI_Isend(&sent.signature, sizeof(CallSignature), MPI_BYTE, peer, signature_tag, comm_,
                          &sent.request),
                "MPI_Isend");
    while (sent_signatures_.size() > 1) {
      int done = 0;
      if (MPI_Test(&sent_signatures_.front().request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS || done == 0)
        break;
      sent_signatures_.pop_front();
    }
  }
  bool poll_signature(CallSignature& signature) override {
    if (signatures_.empty()) return false;
    signature = signatures_.front();
    signatures_.pop_front();
    return true;
  }

  void abort_job(int status) noexcept override { MPI_Abort(comm_, status); }

  void close(bool clean, double seconds) noexcept override {
    clean = clean && in_step(seconds);
    if (!clean) part(longest_parting_seconds);
    for (MPI_Request* request : {&listening_, &signature_request_}) {
      if (*request == MPI_REQUEST_NULL) continue;
      MPI_Cancel(request);
      if (clean) MPI_Wait(request, MPI_STATUS_IGNORE);
    }
    for (SentSignature& sent : sent_signatures_) {
      if (clean && sent.request != MPI_REQUEST_NULL) MPI_Wait(&sent.request, MPI_STATUS_IGNORE);
    }
    // After a failure the communicator is not freed, because that may wait for peers that are gone.
    if (clean) MPI_Comm_free(&comm_);
    if (!clean && clean_end_) *clean_end_ = false;
  }

 private:
  /// Posts a message, in pieces if it is a collective's data to another node.
  template <typename Call>
  std::unique_ptr<Message> post(std::int64_t bytes, int peer, const Tag& tag, bool sending, Call&& call) {
    const auto one = [&](std::int64_t first, std::int64_t size) {
      MPI_Request request = MPI_REQUEST_NULL;
      call(first, static_cast<int>(size), &request);
      return std::make_unique<MpiMessage>(request, size, rank_, peer, sending, rank_names());
    };
    if (bytes <= piece_bytes || tag.point_to_point || !on_other_node(peer)) return one(0, bytes);
    auto message = std::make_unique<MessageInPieces>();
    std::int64_t first = 0;
    for (const std::int64_t size : message_pieces(bytes)) {
      message->add(one(first, size));
      first += size;
    }
    return message;
  }

  bool on_other_node(int peer) const {
    return local_size_ > 0 ? peer / local_size_ != rank_ / local_size_ : node_of(peer) != node_of(rank_);
  }

  void find_nodes(WindowMemory* window) {
    MPI_Comm node = MPI_COMM_NULL;
    require_mpi(MPI_Comm_split_type(comm_, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &node),
                "MPI_Comm_split_type");
    int leader = rank_;
    require_mpi(MPI_Bcast(&leader, 1, MPI_INT, 0, node), "MPI_Bcast");
    window_ = std::make_unique<MpiWindow>(comm_, node, window);
    MPI_Comm_free(&node);
    nodes_.resize(static_cast<std::size_t>(size_));
    require_mpi(MPI_Allgather(&leader, 1, MPI_INT, nodes_.data(), 1, MPI_INT, comm_), "MPI_Allgather");
  }

  void listen() {
    heard_.resize(1000);
    require_mpi(MPI_Irecv(heard_.data(), static_cast<int>(heard_.size()), MPI_BYTE, MPI_ANY_SOURCE,
                          failure_tag, comm_, &listening_),
                "MPI_Irecv");
  }

  void listen_for_signatures() {
    require_mpi(MPI_Irecv(&heard_signature_, sizeof(CallSignature), MPI_BYTE, MPI_ANY_SOURCE, signature_tag,
                          comm_, &signature_request_),
                "MPI_Irecv");
  }

  /// Called after a failure: waits until all peers have arrived here too. The launcher ends the job as soon
  /// as one process exits with an error, but each rank should report its reason before.
  void part(double seconds) noexcept {
    std::vector<MPI_Request> requests;
    std::vector<char> bytes(static_cast<std::size_t>(size_) + 1);
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      MPI_Isend(&bytes.back(), 1, MPI_BYTE, peer, parting_tag, comm_,
                &requests.emplace_back(MPI_REQUEST_NULL));
      MPI_Irecv(&bytes[static_cast<std::size_t>(peer)], 1, MPI_BYTE, peer, parting_tag, comm_,
                &requests.emplace_back(MPI_REQUEST_NULL));
    }
    const double limit = seconds_now() + seconds;
    for (int done = 0; seconds_now() < limit;) {
      if (MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done, MPI_STATUSES_IGNORE) !=
              MPI_SUCCESS ||
          done != 0) {
        return;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    for (MPI_Request& request : requests) {
      if (request == MPI_REQUEST_NULL) continue;
      MPI_Cancel(&request);
      MPI_Request_free(&request);
    }
  }

  /// Sends the peers a report that this rank has ended, if one of them waits in a call that it will never
  /// issue.
  bool answers_in_vain(double limit) {
    for (CallSignature theirs; farewell() && poll_signature(theirs);) {
      const std::optional<FailureReport> report = farewell()(theirs);
      if (!report) continue;
      const double end = std::min(limit, seconds_now() + longest_parting_seconds);
      while (!post_failure(*report) && seconds_now() < end) std::this_thread::yield();
      return true;
    }
    return false;
  }

  /// A barrier that gives up after `seconds`, when a peer reports a failure, or when a peer waits for this
  /// rank.
  bool in_step(double seconds) noexcept {
    MPI_Request barrier = MPI_REQUEST_NULL;
    if (MPI_Ibarrier(comm_, &barrier) != MPI_SUCCESS) return false;
    const double limit = seconds_now() + seconds;
    for (int tries = 0;; ++tries) {
      int done = 0;
      if (MPI_Test(&barrier, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) return false;
      if (done != 0) return true;
      try {
        if (poll_failure() || answers_in_vain(limit)) return false;
      } catch (...) {
        return false;
      }
      if (seconds_now() > limit) return false;
      if (tries > 100) std::this_thread::sleep_for(std::chrono::microseconds(std::min(tries, 1000)));
    }
  }

  MPI_Comm comm_;
  std::shared_ptr<bool> clean_end_;
  int local_size_;  ///< ranks of a declared node; 0: nodes are the machines
  int rank_ = 0, size_ = 1;
  std::vector<int> nodes_;
  std::unique_ptr<MpiWindow> window_;
  std::vector<char> heard_;
  MPI_Request listening_ = MPI_REQUEST_NULL;
  CallSignature heard_signature_;
  MPI_Request signature_request_ = MPI_REQUEST_NULL;
  std::deque<CallSignature> signatures_;
  std::deque<SentSignature> sent_signatures_;
  double next_poll_ = 0;  ///< for failures and signatures
  std::optional<FailureReport> failure_;
  std::array<OutgoingReport, 2> outgoing_;  ///< reports whose cause follows; others
};

}  // namespace

std::unique_ptr<Transport> make_mpi_transport(MPI_Comm communicator, std::shared_ptr<bool> clean_end,
                                              WindowMemory* window, int local_size) {
  return std::make_unique<MpiTransport>(communicator, std::move(clean_end), window, local_size);
}

}  // namespace tranche::comm
