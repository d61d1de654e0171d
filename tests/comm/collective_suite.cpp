#include "tests/comm/collective_suite.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "tests/comm/reduction_order.h"
#include "tranche/core/dtype.h"

namespace tranche::test {

namespace {

const OperationLabel label{"h.3", "backward"};
const OperationLabel control{"", "test", Traffic::control};
const std::int64_t odd_sizes[] = {0, 1, 255, 256, 257, 1009};

template <typename T>
void require_equal(const T& got, const T& wanted, const std::string& where) {
  if (std::memcmp(&got, &wanted, sizeof(T)) == 0) return;
  if constexpr (std::is_arithmetic_v<T>) {
    throw std::runtime_error(fmt::format("{}: got {}, wanted {}", where, got, wanted));
  } else {
    throw std::runtime_error(fmt::format("{}: got {:#x}, wanted {:#x}", where, got.bits, wanted.bits));
  }
}

template <typename T>
void require_same(const std::vector<T>& got, const std::vector<T>& wanted, const std::string& where) {
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    if (std::memcmp(&got[i], &wanted[i], sizeof(T)) != 0) {
      require_equal(got[i], wanted[i], fmt::format("{}, element {}", where, i));
    }
  }
}

template <typename T>
std::vector<T> gradient(int rank, std::int64_t elements, std::uint64_t salt, std::int64_t first = 0) {
  std::vector<T> values(static_cast<std::size_t>(elements));
  for (std::int64_t i = 0; i < elements; ++i) {
    values[static_cast<std::size_t>(i)] = from_float<T>(test_value(rank, first + i, salt));
  }
  return values;
}

/// The values that rank `rank` must get from a reduce_scatter of gradient<T>(s, ...) over n ranks, with
/// `before` in the output.
template <typename T>
std::vector<float> expected_sum(int n, int rank, std::int64_t count, const ReductionOptions& options,
                                std::uint64_t salt, const std::vector<float>& before = {}) {
  std::vector<float> sum(static_cast<std::size_t>(count));
  std::vector<float> terms(static_cast<std::size_t>(n));
  const auto group = static_cast<std::size_t>(std::max(std::abs(options.group_size), 1));
  for (std::int64_t i = 0; i < count; ++i) {
    for (int s = 0; s < n; ++s) {
      terms[static_cast<std::size_t>(s)] = to_float(from_float<T>(test_value(s, rank * count + i, salt)));
    }
    const auto outer = static_cast<std::size_t>(options.outer_group);
    std::vector<float> sums = sums_of_groups(sums_of_groups(terms, group), outer);
    if (options.accumulate) {  // a fold begins with the value that is there, and other sums are added to it
      if (options.group_size > 0) sums = sums_of_groups(sums, sums.size());
      sums.insert(sums.begin(), before[static_cast<std::size_t>(i)]);
    }
    sum[static_cast<std::size_t>(i)] = sums_of_groups(sums, sums.size())[0];
  }
  return sum;
}

/// Values in memory of the communicator's kind.
template <typename T>
class Array {
 public:
  Array(const SuitePlace& place, const std::vector<T>& values)
      : device_(place.device), elements_(static_cast<std::int64_t>(values.size())) {
    if (device_ == nullptr) {
      host_ = values;
      return;
    }
    buffer_ = Buffer(device_->memory(Tier::device), bytes(), Category::other, "suite");
    write(values);
  }
  Array(const SuitePlace& place, std::int64_t elements)
      : Array(place, std::vector<T>(static_cast<std::size_t>(elements))) {}

  T* data() { return device_ == nullptr ? host_.data() : static_cast<T*>(buffer_.data()); }
  void write(const std::vector<T>& values) {
    if (device_ == nullptr) {
      host_ = values;
      return;
    }
    Stream& stream = device_->compute_stream();
    device_->copy_from_host(stream, buffer_.data(), values.data(), bytes());
    stream.synchronize();
  }
  std::vector<T> read() const {
    if (device_ == nullptr) return host_;
    std::vector<T> values(static_cast<std::size_t>(elements_));
    Stream& stream = device_->compute_stream();
    device_->copy_to_host(stream, values.data(), buffer_.data(), bytes());
    stream.synchronize();
    return values;
  }

 private:
  std::int64_t bytes() const { return elements_ * static_cast<std::int64_t>(sizeof(T)); }
  Device* device_;
  std::int64_t elements_;
  std::vector<T> host_;
  Buffer buffer_;
};

/// Runs one reduce_scatter and checks every bit.
template <typename T, typename Out>
void reduce_scatter_case(Communicator& comm, const SuitePlace& place, std::int64_t count,
                         const ReductionOptions& options) {
  const int n = comm.size();
  const auto salt = static_cast<std::uint64_t>(count) + 17;
  Array<T> full(place, gradient<T>(comm.rank(), n * count, salt));
  const auto before = gradient<Out>(100 + comm.rank(), count, salt);
  Array<Out> output(place, before);
  comm.reduce_scatter(full.data(), data_type_of<T>(), output.data(), data_type_of<Out>(), count, options, {},
                      label)
      .wait();
  const int givers = std::min(options.givers, n);
  std::vector<float> held;
  for (const Out value : before) held.push_back(to_float(value));
  std::vector<Out> wanted;
  for (const float sum : expected_sum<T>(givers, comm.rank(), count, options, salt, held)) {
    wanted.push_back(from_float<Out>(sum));
  }
  require_same(
      output.read(), wanted,
      fmt::format("reduce_scatter n={} {}->{} count={} group={}, {} accumulate={} bucket={} givers={}", n,
                  name_of(data_type_of<T>()), name_of(data_type_of<Out>()), count, options.group_size,
                  options.outer_group, options.accumulate, options.bucket_elements, givers));
}

template <typename T>
T reduced_value(int rank, std::int64_t i) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(scramble(static_cast<std::uint64_t>(rank * 77 + i))) - (T{1} << 30);
  } else {
    return static_cast<T>(test_value(rank, i, 5));
  }
}

template <typename T>
void all_reduce_case(Communicator& comm, std::int64_t count, ReduceOperation operation) {
  std::vector<T> values(static_cast<std::size_t>(count)), wanted(values.size());
  for (std::int64_t i = 0; i < count; ++i) {
    T& result = wanted[static_cast<std::size_t>(i)];
    result = reduced_value<T>(0, i);
    for (int s = 1; s < comm.size(); ++s) {
      const T next = reduced_value<T>(s, i);
      switch (operation) {
        case ReduceOperation::sum:
          result = result + next;
          break;
        case ReduceOperation::minimum:
          result = std::min(result, next);
          break;
        case ReduceOperation::maximum:
          result = std::max(result, next);
          break;
      }
    }
    values[static_cast<std::size_t>(i)] = reduced_value<T>(comm.rank(), i);
  }
  comm.all_reduce(values.data(), count, data_type_of<T>(), operation, label).wait();
  require_same(values, wanted,
               fmt::format("all_reduce n={} {} operation {} count={}", comm.size(),
                           name_of(data_type_of<T>()), static_cast<int>(operation), count));
}

/// Elements that one rank sends another.
using PairElements = std::function<std::int64_t(int from, int to)>;

/// Runs one all_to_all_v in the place's memory and checks every bit, including those between the parts.
template <typename T>
void all_to_all_v_case(Communicator& comm, const SuitePlace& place, const std::string& pattern,
                       const PairElements& elements) {
  const int n = comm.size(), rank = comm.rank();
  const auto value = [](int from, int to, std::int64_t i) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(scramble(static_cast<std::uint64_t>((from * 77 + to) * 100'003 + i)));
    } else {
      return from_float<T>(test_value(from, i, static_cast<std::uint64_t>(to)));
    }
  };
  // The parts are not in rank order, and their offsets are odd.
  const auto parts_of = [&](bool sending) {
    std::vector<RankElements> parts(static_cast<std::size_t>(n));
    std::int64_t next = 3;
    for (int r = n - 1; r >= 0; --r) {
      const std::int64_t count = sending ? elements(rank, r) : elements(r, rank);
      parts[static_cast<std::size_t>(r)] = {next, count};
      next += count + 2;
    }
    return std::pair(parts, next);
  };
  const auto [sends, sent_elements] = parts_of(true);
  const auto [receives, received_elements] = parts_of(false);
  std::vector<T> values(static_cast<std::size_t>(sent_elements));
  const std::vector<T> before(static_cast<std::size_t>(received_elements), value(n, n, 7));
  std::vector<T> wanted = before;
  std::int64_t others = 0;
  for (int r = 0; r < n; ++r) {
    const auto& [to, sent] = sends[static_cast<std::size_t>(r)];
    const auto& [from, received] = receives[static_cast<std::size_t>(r)];
    for (std::int64_t i = 0; i < sent; ++i) values[static_cast<std::size_t>(to + i)] = value(rank, r, i);
    for (std::int64_t i = 0; i < received; ++i)
      wanted[static_cast<std::size_t>(from + i)] = value(r, rank, i);
    if (r != rank) others += sent;
  }
  Array<T> out(place, values), in(place, before);
  const TrafficCount count = comm.meter().total(Traffic::data);
  const OperationLabel counted{"suite", "all_to_all_v", Traffic::data,
                               place.device == nullptr ? Tier::host : Tier::device};
  comm.all_to_all_v(out.data(), sends, in.data(), receives, data_type_of<T>(), {}, counted).wait();
  const std::string where = fmt::format("all_to_all_v n={} {} {}", n, name_of(data_type_of<T>()), pattern);
  require_same(in.read(), wanted, where);
  const TrafficCount now = comm.meter().total(Traffic::data);
  require_equal(now.elements - count.elements, others, where + ", elements of the meter");
  require_equal(now.bytes - count.bytes, others * static_cast<std::int64_t>(sizeof(T)),
                where + ", bytes of the meter");
}

}  // namespace

void check_all_gather(Communicator& comm, const SuitePlace& place) {
  const int n = comm.size();
  for (const std::int64_t count : odd_sizes) {
    std::vector<bfloat16> wanted;
    for (int s = 0; s < n; ++s) {
      const auto part = gradient<bfloat16>(s, count, 3);
      wanted.insert(wanted.end(), part.begin(), part.end());
    }
    const auto mine = gradient<bfloat16>(comm.rank(), count, 3);
    Array<bfloat16> own(place, mine);
    for (const std::int64_t bucket : {0, 1, 300}) {
      if (bucket == 1 && count > 300)
        continue;  // such a case sends one message per element, which is slow
                   // and tests nothing new
      for (const bool in_place : {false, true}) {
        std::vector<bfloat16> before(static_cast<std::size_t>(n * count), bfloat16{0xdead});
        if (in_place) std::copy(mine.begin(), mine.end(), before.begin() + comm.rank() * count);
        Array<bfloat16> full(place, before);
        const bfloat16* shard = in_place ? full.data() + comm.rank() * count : own.data();
        comm.all_gather(shard, full.data(), count, DataType::bfloat16, bucket, {}, label).wait();
        require_same(
            full.read(), wanted,
            fmt::format("all_gather n={} count={} bucket={} in_place={}", n, count, bucket, in_place));
      }
    }
  }
}

void check_reduce_scatter(Communicator& comm, std::int64_t staging_bytes, const SuitePlace& place) {
  const int n = comm.size();
  for (const std::int64_t count : odd_sizes) {
    for (int group = 1; group <= n; ++group) {
      reduce_scatter_case<float, float>(comm, place, count, {group, false, 0});
    }
    reduce_scatter_case<bfloat16, float>(comm, place, count, {2, true, 0});
    reduce_scatter_case<float16, float>(comm, place, count, {n, false, 0});
    reduce_scatter_case<bfloat16, bfloat16>(comm, place, count, {1 << 30, true, 0});
    reduce_scatter_case<bfloat16, float>(comm, place, count, {1 << 30, false, 300});
    reduce_scatter_case<float, bfloat16>(comm, place, count, {2, false, 64});
    for (int givers = 1; givers <= n; ++givers) {
      reduce_scatter_case<bfloat16, float>(comm, place, count, {0, true, 0, std::nullopt, givers});
      reduce_scatter_case<bfloat16, float>(comm, place, count, {0, false, 300, std::nullopt, givers});
      reduce_scatter_case<bfloat16, float>(comm, place, count, {-2, true, 0, std::nullopt, givers});
      reduce_scatter_case<float, float>(comm, place, count, {2, true, 0, std::nullopt, givers});
      reduce_scatter_case<bfloat16, float>(comm, place, count, {1, true, 0, std::nullopt, givers, 2});
      reduce_scatter_case<float, float>(comm, place, count, {2, false, 300, std::nullopt, givers, 2});
      reduce_scatter_case<float, float>(comm, place, count, {-1, true, 0, std::nullopt, givers, 2});
    }
  }
  // Sizes near one slot, and sizes well beyond the staging buffer.
  const std::int64_t slot = staging_bytes / 2 / 4 / std::max(1, n - 1);
  for (const std::int64_t count : {slot - 1, slot, slot + 1, 5 * slot + 3}) {
    reduce_scatter_case<float, float>(comm, place, count, {2, true, 0});
    reduce_scatter_case<float16, float16>(comm, place, count, {3, false, 0});
    for (const int givers : {1, n - 1, n}) {
      if (givers > 0) {
        reduce_scatter_case<float, float>(comm, place, count, {0, true, 0, std::nullopt, givers});
        reduce_scatter_case<float, float>(comm, place, count, {-2, true, 0, std::nullopt, givers});
      }
    }
  }
  // In place: the output is this rank's own part of the input.
  const std::int64_t count = 3 * slot + 1;
  Array<float> full(place, gradient<float>(comm.rank(), n * count, 9));
  float* own = full.data() + comm.rank() * count;
  comm.reduce_scatter(full.data(), DataType::float32, own, DataType::float32, count, {2, false, 0}, {}, label)
      .wait();
  const auto got = full.read();
  const auto first = got.begin() + comm.rank() * count;
  require_same(std::vector<float>(first, first + count), expected_sum<float>(n, comm.rank(), count, {2}, 9),
               fmt::format("reduce_scatter in place n={} count={}", n, count));
}

void check_all_reduce(Communicator& comm, std::int64_t staging_bytes) {
  // The last size is beyond the staging buffer and beyond the part reserved for small operations.
  for (const std::int64_t count :
       {std::int64_t{0}, std::int64_t{1}, std::int64_t{257}, staging_bytes / 8 + 20011}) {
    for (const auto operation : {ReduceOperation::sum, ReduceOperation::minimum, ReduceOperation::maximum}) {
      all_reduce_case<float>(comm, count, operation);
      all_reduce_case<double>(comm, count, operation);
      all_reduce_case<std::int64_t>(comm, count, operation);
    }
  }
  // All ranks see a NaN of any rank.
  for (const auto operation : {ReduceOperation::minimum, ReduceOperation::maximum}) {
    for (int culprit = 0; culprit < comm.size(); ++culprit) {
      double value = comm.rank() == culprit ? std::numeric_limits<double>::quiet_NaN() : comm.rank();
      comm.all_reduce(&value, 1, DataType::float64, operation, label).wait();
      if (value == value) throw std::runtime_error(fmt::format("the NaN of rank {} was lost", culprit));
    }
  }
}

void check_all_to_all(Communicator& comm, const SuitePlace& place) {
  const int n = comm.size();
  for (const std::int64_t count : odd_sizes) {
    Array<float16> sent(place, gradient<float16>(comm.rank(), n * count, 8)), received(place, n * count);
    std::vector<float16> wanted;
    for (int from = 0; from < n; ++from) {
      const auto part = gradient<float16>(from, count, 8, comm.rank() * count);
      wanted.insert(wanted.end(), part.begin(), part.end());
    }
    comm.all_to_all(sent.data(), received.data(), count, DataType::float16, {}, label).wait();
    require_same(received.read(), wanted, fmt::format("all_to_all n={} count={}", n, count));
  }
}

void check_all_to_all_v(Communicator& comm, std::int64_t staging_bytes, const SuitePlace& place) {
  const int last = comm.size() - 1;
  // Two-byte elements for each pair, up to the size that a staged exchange sends at once.
  const std::int64_t chunk = staging_bytes / 8 / comm.size();
  const std::pair<const char*, PairElements> patterns[] = {
      {"each pair another number, some none",
       [](int from, int to) { return std::int64_t{(from * 7 + to * 3) % 5} * 1'001; }},
      {"one rank sends", [=](int from, int to) { return from == last ? 257 + to : std::int64_t{0}; }},
      {"one rank receives", [](int from, int to) { return to == 0 ? 3 * from + 1 : std::int64_t{0}; }},
      {"to itself alone", [](int from, int to) { return from == to ? 255 + from : std::int64_t{0}; }},
      {"nothing", [](int, int) { return std::int64_t{0}; }},
      {"one pair in many more chunks than others",
       [=](int from, int to) {
         return from == 0 && to == last   ? 5 * chunk + 3
                : from == last && to == 0 ? 0
                                          : chunk - 1 + (from + to) % 3;
       }},
  };
  for (const auto& [name, elements] : patterns) {
    all_to_all_v_case<float16>(comm, place, name, elements);
    all_to_all_v_case<bfloat16>(comm, place, name, elements);
    all_to_all_v_case<float>(comm, place, name, elements);
    all_to_all_v_case<std::int64_t>(comm, place, name, elements);
    all_to_all_v_case<std::uint8_t>(comm, place, name, elements);
  }
}

void check_broadcast(Communicator& comm, const SuitePlace& place) {
  for (int root = 0; root < comm.size(); ++root) {
    for (const std::int64_t count : odd_sizes) {
      std::vector<std::int64_t> wanted(static_cast<std::size_t>(count)), nothing(wanted.size(), -1);
      std::iota(wanted.begin(), wanted.end(), root * 1000);
      Array<std::int64_t> values(place, comm.rank() == root ? wanted : nothing);
      comm.broadcast(values.data(), count, DataType::int64, root, {}, label).wait();
      require_same(values.read(), wanted, fmt::format("broadcast from {} count={}", root, count));
    }
  }
}

void check_send_recv(Communicator& comm, const SuitePlace& place) {
  const int n = comm.size();
  if (n == 1) return;
  const int next = (comm.rank() + 1) % n, previous = (comm.rank() + n - 1) % n;
  for (const std::int64_t count : odd_sizes) {
    // Two messages around the ring at the same time; the order within a pair is preserved.
    Array<float> first(place, gradient<float>(comm.rank(), count, 1)),
        second(place, gradient<float>(comm.rank(), count, 2)), got_first(place, count),
        got_second(place, count);
    std::vector<Event> events;
    events.push_back(comm.send(first.data(), count, DataType::float32, next, {}, label));
    events.push_back(comm.send(second.data(), count, DataType::float32, next, {}, label));
    events.push_back(comm.recv(got_first.data(), count, DataType::float32, previous, {}, label));
    events.push_back(comm.recv(got_second.data(), count, DataType::float32, previous, {}, label));
    for (const Event& event : events) event.wait();
    require_same(got_first.read(), gradient<float>(previous, count, 1),
                 fmt::format("first recv count={}", count));
    require_same(got_second.read(), gradient<float>(previous, count, 2),
                 fmt::format("second recv count={}", count));
  }
}

void check_split(Communicator& comm, const SuitePlace& place) {
  const int n = comm.size(), parity = comm.rank() % 2;
  // Groups of even and odd ranks, in reverse order.
  const auto half = comm.split(parity, -comm.rank());
  const int members = (n + 1 - parity) / 2;
  require_equal(half->size(), members, "size of a split group");
  require_equal(half->rank(), members - 1 - comm.rank() / 2, "rank in a split group");
  // Both communicators work at the same time.
  Array<std::int64_t> ranks(place, members);
  std::vector<std::int64_t> wanted(static_cast<std::size_t>(members));
  for (int i = 0; i < members; ++i) wanted[static_cast<std::size_t>(i)] = 2 * (members - 1 - i) + parity;
  Array<std::int64_t> mine(place, std::vector<std::int64_t>{comm.rank()});
  Array<float> whole(place, gradient<float>(comm.rank(), n * 100, 4)), sum(place, 100);
  const Event outer =
      comm.reduce_scatter(whole.data(), DataType::float32, sum.data(), DataType::float32, 100, {}, {}, label);
  half->all_gather(mine.data(), ranks.data(), 1, DataType::int64, 0, {}, label).wait();
  outer.wait();
  require_same(ranks.read(), wanted, "members of a split group");
  require_same(sum.read(), expected_sum<float>(n, comm.rank(), 100, {n}, 4),
               "the whole group beside a split one");
  reduce_scatter_case<bfloat16, float>(*half, place, 777, {2, false, 0});
  // A split of a split, a second split of the whole at the same time, and a rank that is in no group.
  const auto alone = half->split(half->rank(), 0);
  require_equal(alone->size(), 1, "size of a group of one");
  const auto rest = comm.split(comm.rank() == 0 ? -1 : 3, 0);
  if ((rest == nullptr) != (comm.rank() == 0)) {
    throw std::runtime_error("colour < 0 and no other must give no communicator");
  }
  if (rest) reduce_scatter_case<float, float>(*rest, place, 257, {2, false, 0});
  double one = 1;
  alone->all_reduce(&one, 1, DataType::float64, ReduceOperation::sum, label).wait();
  require_equal(one, 1.0, "all_reduce of a group of one");
  half->barrier(label).wait();
}

void check_many_in_flight(Communicator& comm, int operations, const SuitePlace& place) {
  const int n = comm.size(), rank = comm.rank();
  struct Job {
    std::int64_t count;
    Array<float> full, out;
    Array<bfloat16> gathered;
    double value;
    Event events[3];
  };
  std::vector<Job> jobs;
  jobs.reserve(static_cast<std::size_t>(operations));  // keeps addresses valid
  for (int k = 0; k < operations; ++k) {
    const auto salt = static_cast<std::uint64_t>(k);
    const std::int64_t count = 1 + scramble(salt) % 3000;
    std::vector<bfloat16> own(static_cast<std::size_t>(n * count));
    const auto part = gradient<bfloat16>(rank, count, salt);
    std::copy(part.begin(), part.end(), own.begin() + rank * count);
    jobs.push_back(Job{count,
                       Array<float>(place, gradient<float>(rank, n * count, salt)),
                       Array<float>(place, count),
                       Array<bfloat16>(place, own),
                       rank + static_cast<double>(k),
                       {}});
    Job& job = jobs.back();
    job.events[0] = comm.reduce_scatter(job.full.data(), DataType::float32, job.out.data(), DataType::float32,
                                        job.count, {2, false, 0}, {}, label);
    job.events[1] = comm.all_gather(job.gathered.data() + rank * job.count, job.gathered.data(), job.count,
                                    DataType::bfloat16, 0, {}, label);
    job.events[2] = comm.all_reduce(&job.value, 1, DataType::float64, ReduceOperation::sum, label);
  }
  for (auto job = jobs.rbegin(); job != jobs.rend(); ++job) {
    for (const Event& event : job->events) event.wait();
  }
  for (std::size_t k = 0; k < jobs.size(); ++k) {
    const Job& job = jobs[k];
    require_equal(job.value, n * (n - 1) / 2.0 + n * static_cast<double>(k),
                  fmt::format("all_reduce {} of many", k));
    require_same(job.out.read(), expected_sum<float>(n, rank, job.count, {2}, k),
                 fmt::format("reduce_scatter {} of many", k));
    std::vector<bfloat16> wanted;
    for (int s = 0; s < n; ++s) {
      const auto part = gradient<bfloat16>(s, job.count, k);
      wanted.insert(wanted.end(), part.begin(), part.end());
    }
    require_same(job.gathered.read(), wanted, fmt::format("all_gather {} of many", k));
  }
}

void check_late_ready(Communicator& comm, const SuitePlace& place) {
  const int n = comm.size();
  const std::int64_t count = 500;
  auto gate = std::make_shared<HostEvent>();
  const std::vector<Event> ready{Event(), Event(gate)};
  Array<float> full(place, gradient<float>(comm.rank(), n * count, 6)), late(place, count),
      early(place, count);
  const Event first = comm.reduce_scatter(full.data(), DataType::float32, late.data(), DataType::float32,
                                          count, {}, ready, label);
  const Event second = comm.reduce_scatter(full.data(), DataType::float32, early.data(), DataType::float32,
                                           count, {}, {}, label);
  double value = 1;
  comm.all_reduce(&value, 1, DataType::float64, ReduceOperation::sum, label).wait();
  if (!place.in_order) second.wait();  // would hang if operations progressed only in order
  if (first.query()) throw std::runtime_error("an operation ran before its ready event");
  gate->complete();
  first.wait();
  second.wait();
  require_same(late.read(), early.read(), "a late sum");
}

void check_meter(Communicator& comm, const SuitePlace& place) {
  const std::int64_t n = comm.size(), count = 321;
  comm.barrier(control).wait();
  comm.meter().reset();
  Array<bfloat16> full(place, n * count);
  Array<float> shard(place, count);
  comm.all_gather(full.data() + comm.rank() * count, full.data(), count, DataType::bfloat16, 0, {}, label)
      .wait();
  comm.reduce_scatter(full.data(), DataType::bfloat16, shard.data(), DataType::float32, count, {}, {}, label)
      .wait();
  ReductionOptions of_two;
  of_two.givers = 2;
  comm.reduce_scatter(full.data(), DataType::bfloat16, shard.data(), DataType::float32, count, of_two, {},
                      {"h.3", "a short round", Traffic::control})
      .wait();
  double value = 0;
  comm.all_reduce(&value, 1, DataType::float64, ReduceOperation::sum, control).wait();
  comm.broadcast(shard.data(), 7, DataType::float32, 0, {}, control).wait();
  comm.barrier(control).wait();
  const auto data = comm.meter().counts(Traffic::data), rest = comm.meter().counts(Traffic::control);
  require_equal(data.at("all_gather").elements, (n - 1) * count, "elements of all_gather");
  require_equal(data.at("all_gather").bytes, (n - 1) * count * 2, "bytes of all_gather");
  require_equal(data.at("reduce_scatter").elements, (n - 1) * count, "elements of reduce_scatter");
  require_equal(data.at("reduce_scatter").calls, std::int64_t{1}, "calls of reduce_scatter");
  require_equal(comm.meter().total(Traffic::data).elements, 2 * (n - 1) * count, "data elements");
  require_equal(rest.at("reduce_scatter").elements, comm.rank() < 2 ? (n - 1) * count : 0,
                "elements of a reduce_scatter of two ranks' values");
  require_equal(rest.at("all_reduce").bytes, (n - 1) * 8, "bytes of all_reduce");
  require_equal(rest.at("broadcast").elements, comm.rank() == 0 ? (n - 1) * 7 : 0, "elements of broadcast");
  require_equal(rest.at("barrier").bytes, std::int64_t{0}, "bytes of barrier");
}

void check_hash(Communicator& comm) {
  std::int64_t hash[2];
  hash[0] = hash[1] = static_cast<std::int64_t>(comm.sequence_hash());
  comm.all_reduce(&hash[0], 1, DataType::int64, ReduceOperation::minimum, label).wait();
  comm.all_reduce(&hash[1], 1, DataType::int64, ReduceOperation::maximum, label).wait();
  require_equal(hash[0], hash[1], "sequence hash over ranks");
  const auto before = comm.sequence_hash();
  comm.barrier(label).wait();
  if (comm.sequence_hash() == before) throw std::runtime_error("a barrier left the sequence hash unchanged");
}

void check_everything(Communicator& comm, std::int64_t staging_bytes, const SuitePlace& place) {
  check_all_gather(comm, place);
  check_reduce_scatter(comm, staging_bytes, place);
  check_all_reduce(comm, staging_bytes);
  check_all_to_all(comm, place);
  check_all_to_all_v(comm, staging_bytes, place);
  if (place.device != nullptr) check_all_to_all_v(comm, staging_bytes);  // with buffers in host memory
  check_broadcast(comm, place);
  check_send_recv(comm, place);
  check_split(comm, place);
  check_many_in_flight(comm, 40, place);
  check_late_ready(comm, place);
  check_meter(comm, place);
  check_hash(comm);
}

}  // namespace tranche::test
