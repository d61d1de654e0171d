#include "tests/pipeline/schedule/schedule_threads.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace tranche::test {

namespace {

using pipeline::Action;
using pipeline::ActionKind;
using pipeline::MessageModel;
using pipeline::PipelineSchedule;
using Number = std::uint64_t;
using Place = std::pair<int, std::int64_t>;  // chunk, micro-batch

Number mix(Number a, Number b, Number c) {
  Number mixed = (a ^ (b * 0x9e3779b97f4a7c15)) + c;
  mixed = (mixed ^ (mixed >> 31)) * 0xbf58476d1ce4e5b9;
  return mixed ^ (mixed >> 29);
}
Number tokens(std::int64_t micro_batch) {
  return mix(1, static_cast<Number>(micro_batch), 17);
}
Number forward(int chunk, Number input) {
  return mix(input, static_cast<Number>(chunk), 2);
}
Number input_gradient(int chunk, Number input, Number gradient) {
  return mix(input, gradient, 3 + static_cast<Number>(chunk));
}
Number added(Number sum, Number input, Number gradient) {
  return mix(sum, input, gradient);
}

/// Sums of gradients of a chunk: those of its weights, and those that are added with input gradients.
struct Sums {
  Number weights = 0, beside_inputs = 0;
  friend bool operator==(const Sums&, const Sums&) = default;
};

/// The sums of all chunks on one rank, computed micro-batch by micro-batch.
std::vector<Sums> serial(int chunks, std::int64_t micro_batches) {
  std::vector<Sums> sums(static_cast<std::size_t>(chunks));
  for (std::int64_t m = 0; m < micro_batches; ++m) {
    std::vector<Number> inputs{tokens(m)};
    for (int chunk = 0; chunk < chunks; ++chunk) inputs.push_back(forward(chunk, inputs.back()));
    Number gradient = inputs.back();
    for (int chunk = chunks; chunk-- > 0;) {
      const auto c = static_cast<std::size_t>(chunk);
      sums[c].weights = added(sums[c].weights, inputs[c], gradient);
      sums[c].beside_inputs = added(sums[c].beside_inputs, inputs[c], gradient);
      gradient = input_gradient(chunk, inputs[c], gradient);
    }
  }
  return sums;
}

/// The residual, or its gradient, of a micro-batch between one chunk and the next.
struct Message {
  bool residual = true;
  int cut = 0;
  std::int64_t micro_batch = 0;
  auto operator<=>(const Message&) const = default;
};

/// Shared by all ranks. A rank waits inside `send` and `receive`, which return nothing when the run has
/// ended.
class Mailboxes {
 public:
  Mailboxes(MessageModel model, int ranks)
      : model_(model), ranks_(ranks), offers_(static_cast<std::size_t>(ranks)) {}

  bool send(int from, int to, const Message& message, Number value) {
    std::unique_lock lock(mutex_);
    if (model_ == MessageModel::stream) {
      std::optional<std::pair<Message, Number>>& offer = offers_[static_cast<std::size_t>(from)];
      offer = {message, value};
      changed();
      return wait(lock, [&] { return !offer; });
    }
    if (model_ == MessageModel::async) {
      box_.emplace(message, value);
    } else {
      queues_[{from, to, message.residual}].push_back({message, value});
    }
    changed();
    return !over_;
  }
  std::optional<Number> receive(int from, int to, const Message& message) {
    std::unique_lock lock(mutex_);
    Number value = 0;
    const auto take = [&] {
      if (model_ == MessageModel::stream) {
        std::optional<std::pair<Message, Number>>& offer = offers_[static_cast<std::size_t>(from)];
        if (!offer || offer->first != message) return false;
        value = offer->second;
        offer.reset();
        return true;
      }
      if (model_ == MessageModel::async) {
        const auto found = box_.find(message);
        if (found == box_.end()) return false;
        value = found->second;
        box_.erase(found);
        return true;
      }
      std::deque<std::pair<Message, Number>>& queue = queues_[{from, to, message.residual}];
      if (queue.empty() || queue.front().first != message) return false;
      value = queue.front().second;
      queue.pop_front();
      return true;
    };
    if (!wait(lock, take)) return std::nullopt;
    changed();
    return value;
  }
  void leave() {
    const std::lock_guard lock(mutex_);
    ++left_;
    look_whether_all_wait();
  }
  void fail(const std::string& why) {
    const std::lock_guard lock(mutex_);
    if (!over_) end({Outcome::broken, why});
  }
  /// Call it when all threads have ended.
  Ending ending() const { return ending_; }
  bool empty() const {
    return box_.empty() &&
           std::all_of(queues_.begin(), queues_.end(), [](const auto& q) { return q.second.empty(); });
  }

 private:
  template <class Ready>
  bool wait(std::unique_lock<std::mutex>& lock, const Ready& ready) {
    while (!over_) {
      if (ready()) return true;
      const std::uint64_t seen = version_;
      ++waiting_;
      look_whether_all_wait();
      wake_.wait(lock, [&] { return over_ || version_ != seen; });
    }
    return false;
  }
  /// Lets waiting ranks check again.
  void changed() {
    ++version_;
    waiting_ = 0;
    wake_.notify_all();
  }
  void look_whether_all_wait() {
    if (!over_ && waiting_ > 0 && waiting_ + left_ == ranks_) end({Outcome::hung, ""});
  }
  void end(const Ending& ending) {
    over_ = true;
    ending_ = ending;
    wake_.notify_all();
  }

  MessageModel model_;
  int ranks_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::uint64_t version_ = 0;
  int waiting_ = 0;  ///< ranks that had nothing to do since the last change
  int left_ = 0;
  bool over_ = false;
  Ending ending_;
  std::multimap<Message, Number> box_;
  std::map<std::tuple<int, int, bool>, std::deque<std::pair<Message, Number>>> queues_;
  std::vector<std::optional<std::pair<Message, Number>>> offers_;  ///< one for each sender
};

class Broken : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Executes the list of one rank in order.
class Rank {
 public:
  Rank(const PipelineSchedule& schedule, int rank, bool gathers, Mailboxes& mail)
      : schedule_(schedule), rank_(rank), gathers_(gathers), mail_(mail) {
    if (schedule.rank_of_chunk[0] != rank) return;
    for (std::int64_t m = 0; m < schedule.micro_batches; ++m) inputs_[{0, m}] = tokens(m);
  }

  void run() {
    for (const Action& action : schedule_.ranks[static_cast<std::size_t>(rank_)]) {
      try {
        if (!run(action)) break;
      } catch (const Broken& broken) {
        mail_.fail(action.name() + " of rank " + std::to_string(rank_) + ": " + broken.what());
        break;
      }
    }
    mail_.leave();
  }
  const std::map<int, Sums>& sums() const { return sums_; }
  bool nothing_left() const {
    return inputs_.empty() && activations_.empty() && outputs_.empty() && gradients_.empty() &&
           halves_.empty() && input_gradients_.empty() && gathered_.empty();
  }

 private:
  using Numbers = std::map<Place, Number>;
  static Number take(Numbers& from, const Place& place, const char* what) {
    const auto found = from.find(place);
    if (found == from.end()) throw Broken(std::string("no ") + what);
    const Number value = found->second;
    from.erase(found);
    return value;
  }
  static void put(Numbers& to, const Place& place, Number value) {
    if (!to.emplace(place, value).second) throw Broken("its result is there");
  }
  bool here(int chunk) const { return schedule_.rank_of_chunk[static_cast<std::size_t>(chunk)] == rank_; }
  int holder(int chunk) const {
    if (chunk < 0 || chunk >= schedule_.chunks()) throw Broken("no such neighbour");
    return schedule_.rank_of_chunk[static_cast<std::size_t>(chunk)];
  }

  /// Returns false if the run has ended.
  bool run(const Action& action) {
    const Place place{action.chunk, action.micro_batch};
    const int chunk = action.chunk;
    const bool last = chunk + 1 == schedule_.chunks();
    if (pipeline::computes(action.kind) && gathers_) {
      if (gathered_.count(chunk) == 0) throw Broken("not gathered");
      gathered_[chunk] = true;
    }
    switch (action.kind) {
      case ActionKind::forward: {
        const Number input = take(inputs_, place, "input");
        const Number output = forward(chunk, input);
        put(activations_, place, input);
        if (last) {
          put(gradients_, place, output);
        } else if (here(chunk + 1)) {
          put(inputs_, {chunk + 1, action.micro_batch}, output);
        } else {
          put(outputs_, place, output);
        }
        return true;
      }
      case ActionKind::backward: {
        const Number gradient = take(gradients_, place, "gradient");
        const Number input = take(activations_, place, "activation");
        sums_[chunk].weights = added(sums_[chunk].weights, input, gradient);
        pass_back(place, input, gradient);
        return true;
      }
      case ActionKind::input_gradient: {
        const Number gradient = take(gradients_, place, "gradient");
        if (activations_.count(place) == 0) throw Broken("no activation");
        pass_back(place, activations_[place], gradient);
        put(halves_, place, gradient);
        return true;
      }
      case ActionKind::weight_gradient: {
        const Number gradient = take(halves_, place, "input gradient before it");
        sums_[chunk].weights = added(sums_[chunk].weights, take(activations_, place, "activation"), gradient);
        return true;
      }
      case ActionKind::send_residual:
        return mail_.send(rank_, holder(chunk + 1), {true, chunk, action.micro_batch},
                          take(outputs_, place, "output"));
      case ActionKind::send_gradient:
        return mail_.send(rank_, holder(chunk - 1), {false, chunk - 1, action.micro_batch},
                          take(input_gradients_, place, "input gradient"));
      case ActionKind::receive_residual:
        return received(inputs_, place, holder(chunk - 1), {true, chunk - 1, action.micro_batch});
      case ActionKind::receive_gradient:
        return received(gradients_, place, holder(chunk + 1), {false, chunk, action.micro_batch});
      case ActionKind::gather:
        if (!gathered_.emplace(chunk, false).second) throw Broken("gathered twice");
        return true;
      case ActionKind::free:
        if (gathered_.count(chunk) == 0) throw Broken("freed without a gather");
        if (!gathered_[chunk]) throw Broken("gathered for nothing");
        gathered_.erase(chunk);
        return true;
    }
    return true;
  }
  void pass_back(const Place& place, Number input, Number output_gradient) {
    Number& sum = sums_[place.first].beside_inputs;
    sum = added(sum, input, output_gradient);
    if (place.first == 0) return;
    const Number gradient = input_gradient(place.first, input, output_gradient);
    if (here(place.first - 1)) {
      put(gradients_, {place.first - 1, place.second}, gradient);
    } else {
      put(input_gradients_, place, gradient);
    }
  }
  bool received(Numbers& to, const Place& place, int from, const Message& message) {
    const std::optional<Number> value = mail_.receive(from, rank_, message);
    if (value) put(to, place, *value);
    return value.has_value();
  }

  const PipelineSchedule& schedule_;
  int rank_;
  bool gathers_;
  Mailboxes& mail_;
  Numbers inputs_, activations_, outputs_, gradients_, halves_, input_gradients_;
  std::map<int, Sums> sums_;
  std::map<int, bool> gathered_;  ///< true if it was used
};

}  // namespace

Ending run_by_threads(const PipelineSchedule& schedule, MessageModel model) {
  bool gathers = false;
  for (const std::vector<Action>& line : schedule.ranks) {
    for (const Action& action : line) gathers = gathers || action.kind == ActionKind::gather;
  }
  Mailboxes mail(model, schedule.stages());
  std::vector<Rank> ranks;
  for (int rank = 0; rank < schedule.stages(); ++rank) ranks.emplace_back(schedule, rank, gathers, mail);
  {
    std::vector<std::jthread> threads;
    for (std::size_t rank = 1; rank < ranks.size(); ++rank)
      threads.emplace_back([&, rank] { ranks[rank].run(); });
    ranks[0].run();
  }
  Ending ending = mail.ending();
  if (ending.outcome != Outcome::trained) return ending;
  const std::vector<Sums> expected = serial(schedule.chunks(), schedule.micro_batches);
  for (const Rank& rank : ranks) {
    if (!rank.nothing_left()) return {Outcome::broken, "a rank has results that nobody used"};
    for (const auto& [chunk, sum] : rank.sums()) {
      if (sum != expected[static_cast<std::size_t>(chunk)])
        return {Outcome::broken, "other sums of gradients"};
    }
  }
  std::size_t sums = 0;
  for (const Rank& rank : ranks) sums += rank.sums().size();
  if (sums != expected.size()) return {Outcome::broken, "chunks without weight gradients"};
  return mail.empty() ? ending : Ending{Outcome::broken, "messages that nobody received"};
}

}  // namespace tranche::test
