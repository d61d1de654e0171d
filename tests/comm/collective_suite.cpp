#include "tranche/tests/comm/collective_suite.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include <fmt/format.h>

#include "tranche/core/dtype.h"
#include "tranche/tests/comm/ordered_bracket.h"

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

/// What rank `rank` must get from a reduce_scatter of gradient<T>(s, ...) over n ranks.
template <typename T>
std::vector<float> expected_sum(int n, int rank, std::int64_t count, int group_size, std::uint64_t salt) {
  std::vector<float> sum(static_cast<std::size_t>(count));
  std::vector<float> terms(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < count; ++i) {
    for (int s = 0; s < n; ++s) {
      terms[static_cast<std::size_t>(s)] = to_float(from_float<T>(test_value(s, rank * count + i, salt)));
    }
    sum[static_cast<std::size_t>(i)] = bracket(terms, std::min(group_size, n));
  }
  return sum;
}

/// Runs one reduce_scatter and checks every bit.
template <typename T, typename Out>
void reduce_scatter_case(Communicator& comm, std::int64_t count, const OrderedSumOptions& options) {
  const int n = comm.size();
  const auto salt = static_cast<std::uint64_t>(count) + 17;
  const auto full = gradient<T>(comm.rank(), n * count, salt);
  auto output = gradient<Out>(100 + comm.rank(), count, salt);
  const auto before = output;
  comm.reduce_scatter(full.data(), data_type_of<T>(), output.data(), data_type_of<Out>(), count, options, {},
                      label)
      .wait();
  const auto sum = expected_sum<T>(n, comm.rank(), count, options.group_size, salt);
  std::vector<Out> wanted(sum.size());
  for (std::size_t i = 0; i < sum.size(); ++i) {
    wanted[i] = from_float<Out>(options.accumulate ? to_float(before[i]) + sum[i] : sum[i]);
  }
  require_same(output, wanted,
               fmt::format("reduce_scatter n={} {}->{} count={} group={} accumulate={} bucket={}", n,
                           name_of(data_type_of<T>()), name_of(data_type_of<Out>()), count,
                           options.group_size, options.accumulate, options.bucket_elements));
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

}  // namespace

void check_all_gather(Communicator& comm) {
  const int n = comm.size();
  for (const std::int64_t count : odd_sizes) {
    std::vector<bfloat16> wanted;
    for (int s = 0; s < n; ++s) {
      const auto part = gradient<bfloat16>(s, count, 3);
      wanted.insert(wanted.end(), part.begin(), part.end());
    }
    const auto own = gradient<bfloat16>(comm.rank(), count, 3);
    for (const std::int64_t bucket : {0, 1, 300}) {
      if (bucket == 1 && count > 300) continue;  // a message an element: slow, and nothing new
      for (const bool in_place : {false, true}) {
        std::vector<bfloat16> full(static_cast<std::size_t>(n * count), bfloat16{0xdead});
        if (in_place) std::copy(own.begin(), own.end(), full.begin() + comm.rank() * count);
        const bfloat16* shard = in_place ? full.data() + comm.rank() * count : own.data();
        comm.all_gather(shard, full.data(), count, DataType::bfloat16, bucket, {}, label).wait();
        require_same(
            full, wanted,
            fmt::format("all_gather n={} count={} bucket={} in_place={}", n, count, bucket, in_place));
      }
    }
  }
}

void check_reduce_scatter(Communicator& comm, std::int64_t slab_bytes) {
  const int n = comm.size();
  for (const std::int64_t count : odd_sizes) {
    for (int group = 1; group <= n; ++group) {
      reduce_scatter_case<float, float>(comm, count, {group, false, 0});
    }
    reduce_scatter_case<bfloat16, float>(comm, count, {2, true, 0});
    reduce_scatter_case<float16, float>(comm, count, {n, false, 0});
    reduce_scatter_case<bfloat16, bfloat16>(comm, count, {1 << 30, true, 0});
    reduce_scatter_case<bfloat16, float>(comm, count, {1 << 30, false, 300});
    reduce_scatter_case<float, bfloat16>(comm, count, {2, false, 64});
  }
  // Sizes around one lane, and well beyond the slab.
  const std::int64_t lane = slab_bytes / 2 / 4 / std::max(1, n - 1);
  for (const std::int64_t count : {lane - 1, lane, lane + 1, 5 * lane + 3}) {
    reduce_scatter_case<float, float>(comm, count, {2, true, 0});
    reduce_scatter_case<float16, float16>(comm, count, {3, false, 0});
  }
  // In place: output is this rank's own part of what it sends.
  const std::int64_t count = 3 * lane + 1;
  auto full = gradient<float>(comm.rank(), n * count, 9);
  float* own = full.data() + comm.rank() * count;
  comm.reduce_scatter(full.data(), DataType::float32, own, DataType::float32, count, {2, false, 0}, {}, label)
      .wait();
  require_same(std::vector<float>(own, own + count), expected_sum<float>(n, comm.rank(), count, 2, 9),
               fmt::format("reduce_scatter in place n={} count={}", n, count));
}

void check_all_reduce(Communicator& comm, std::int64_t slab_bytes) {
  // The last is beyond the slab, and beyond what is kept apart for small ones.
  for (const std::int64_t count :
       {std::int64_t{0}, std::int64_t{1}, std::int64_t{257}, slab_bytes / 8 + 20011}) {
    for (const auto operation : {ReduceOperation::sum, ReduceOperation::minimum, ReduceOperation::maximum}) {
      all_reduce_case<float>(comm, count, operation);
      all_reduce_case<double>(comm, count, operation);
      all_reduce_case<std::int64_t>(comm, count, operation);
    }
  }
  // A NaN of any rank is seen by all.
  for (const auto operation : {ReduceOperation::minimum, ReduceOperation::maximum}) {
    for (int culprit = 0; culprit < comm.size(); ++culprit) {
      double value = comm.rank() == culprit ? std::numeric_limits<double>::quiet_NaN() : comm.rank();
      comm.all_reduce(&value, 1, DataType::float64, operation, label).wait();
      if (value == value) throw std::runtime_error(fmt::format("the NaN of rank {} was lost", culprit));
    }
  }
}

void check_all_to_all(Communicator& comm) {
  const int n = comm.size();
  for (const std::int64_t count : odd_sizes) {
    const auto sent = gradient<float16>(comm.rank(), n * count, 8);
    std::vector<float16> received(sent.size()), wanted;
    for (int from = 0; from < n; ++from) {
      const auto part = gradient<float16>(from, count, 8, comm.rank() * count);
      wanted.insert(wanted.end(), part.begin(), part.end());
    }
    comm.all_to_all(sent.data(), received.data(), count, DataType::float16, {}, label).wait();
    require_same(received, wanted, fmt::format("all_to_all n={} count={}", n, count));
  }
}

void check_broadcast(Communicator& comm) {
  for (int root = 0; root < comm.size(); ++root) {
    for (const std::int64_t count : odd_sizes) {
      std::vector<std::int64_t> wanted(static_cast<std::size_t>(count)), values(wanted.size(), -1);
      std::iota(wanted.begin(), wanted.end(), root * 1000);
      if (comm.rank() == root) values = wanted;
      comm.broadcast(values.data(), count, DataType::int64, root, {}, label).wait();
      require_same(values, wanted, fmt::format("broadcast from {} count={}", root, count));
    }
  }
}

void check_send_recv(Communicator& comm) {
  const int n = comm.size();
  if (n == 1) return;
  const int next = (comm.rank() + 1) % n, previous = (comm.rank() + n - 1) % n;
  for (const std::int64_t count : odd_sizes) {
    // Two messages round the ring, under way at once: order within a pair is kept.
    const auto first = gradient<float>(comm.rank(), count, 1),
               second = gradient<float>(comm.rank(), count, 2);
    std::vector<float> got_first(first.size()), got_second(second.size());
    std::vector<Event> events;
    events.push_back(comm.send(first.data(), count, DataType::float32, next, {}, label));
    events.push_back(comm.send(second.data(), count, DataType::float32, next, {}, label));
    events.push_back(comm.recv(got_first.data(), count, DataType::float32, previous, {}, label));
    events.push_back(comm.recv(got_second.data(), count, DataType::float32, previous, {}, label));
    for (const Event& event : events) event.wait();
    require_same(got_first, gradient<float>(previous, count, 1), fmt::format("first recv count={}", count));
    require_same(got_second, gradient<float>(previous, count, 2), fmt::format("second recv count={}", count));
  }
}

void check_split(Communicator& comm) {
  const int n = comm.size(), parity = comm.rank() % 2;
  // Even and odd ranks, in reverse order.
  const auto half = comm.split(parity, -comm.rank());
  const int members = (n + 1 - parity) / 2;
  require_equal(half->size(), members, "size of a split group");
  require_equal(half->rank(), members - 1 - comm.rank() / 2, "rank in a split group");
  // Both communicators at work at once.
  std::vector<std::int64_t> ranks(static_cast<std::size_t>(members)), wanted(ranks.size());
  for (int i = 0; i < members; ++i) wanted[static_cast<std::size_t>(i)] = 2 * (members - 1 - i) + parity;
  const std::int64_t mine = comm.rank();
  const auto whole = gradient<float>(comm.rank(), n * 100, 4);
  std::vector<float> sum(100);
  const Event outer =
      comm.reduce_scatter(whole.data(), DataType::float32, sum.data(), DataType::float32, 100, {}, {}, label);
  half->all_gather(&mine, ranks.data(), 1, DataType::int64, 0, {}, label).wait();
  outer.wait();
  require_same(ranks, wanted, "members of a split group");
  require_same(sum, expected_sum<float>(n, comm.rank(), 100, n, 4), "the whole group beside a split one");
  reduce_scatter_case<bfloat16, float>(*half, 777, {2, false, 0});
  // A split of a split, beside a second split of the whole; and a rank that belongs to none.
  const auto alone = half->split(half->rank(), 0);
  require_equal(alone->size(), 1, "size of a group of one");
  const auto rest = comm.split(comm.rank() == 0 ? -1 : 3, 0);
  if ((rest == nullptr) != (comm.rank() == 0)) {
    throw std::runtime_error("colour < 0 and no other must give no communicator");
  }
  if (rest) reduce_scatter_case<float, float>(*rest, 257, {2, false, 0});
  double one = 1;
  alone->all_reduce(&one, 1, DataType::float64, ReduceOperation::sum, label).wait();
  require_equal(one, 1.0, "all_reduce of a group of one");
  half->barrier(label).wait();
}

void check_many_in_flight(Communicator& comm, int operations) {
  const int n = comm.size(), rank = comm.rank();
  struct Job {
    std::int64_t count;
    std::vector<float> full, out;
    std::vector<bfloat16> gathered;
    double value;
    Event events[3];
  };
  std::vector<Job> jobs(static_cast<std::size_t>(operations));
  for (std::size_t k = 0; k < jobs.size(); ++k) {
    Job& job = jobs[k];
    job.count = 1 + scramble(k) % 3000;
    job.full = gradient<float>(rank, n * job.count, k);
    job.out.resize(static_cast<std::size_t>(job.count));
    job.gathered.resize(static_cast<std::size_t>(n * job.count));
    const auto own = gradient<bfloat16>(rank, job.count, k);
    std::copy(own.begin(), own.end(), job.gathered.begin() + rank * job.count);
    job.value = rank + static_cast<double>(k);
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
    require_same(job.out, expected_sum<float>(n, rank, job.count, 2, k),
                 fmt::format("reduce_scatter {} of many", k));
    std::vector<bfloat16> wanted;
    for (int s = 0; s < n; ++s) {
      const auto part = gradient<bfloat16>(s, job.count, k);
      wanted.insert(wanted.end(), part.begin(), part.end());
    }
    require_same(job.gathered, wanted, fmt::format("all_gather {} of many", k));
  }
}

void check_late_ready(Communicator& comm) {
  const int n = comm.size();
  const std::int64_t count = 500;
  auto gate = std::make_shared<HostEvent>();
  const std::vector<Event> ready{Event(), Event(gate)};
  const auto full = gradient<float>(comm.rank(), n * count, 6);
  std::vector<float> late(static_cast<std::size_t>(count)), early(late.size());
  const Event first = comm.reduce_scatter(full.data(), DataType::float32, late.data(), DataType::float32,
                                          count, {}, ready, label);
  const Event second = comm.reduce_scatter(full.data(), DataType::float32, early.data(), DataType::float32,
                                           count, {}, {}, label);
  double value = 1;
  comm.all_reduce(&value, 1, DataType::float64, ReduceOperation::sum, label).wait();
  second.wait();  // would never return if operations moved in order only
  if (first.query()) throw std::runtime_error("an operation ran before its ready event");
  gate->complete();
  first.wait();
  require_same(late, early, "a late sum");
}

void check_meter(Communicator& comm) {
  const std::int64_t n = comm.size(), count = 321;
  comm.barrier(control).wait();
  comm.meter().reset();
  std::vector<bfloat16> full(static_cast<std::size_t>(n * count));
  std::vector<float> shard(static_cast<std::size_t>(count));
  comm.all_gather(full.data() + comm.rank() * count, full.data(), count, DataType::bfloat16, 0, {}, label)
      .wait();
  comm.reduce_scatter(full.data(), DataType::bfloat16, shard.data(), DataType::float32, count, {}, {}, label)
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

void check_everything(Communicator& comm, std::int64_t slab_bytes) {
  check_all_gather(comm);
  check_reduce_scatter(comm, slab_bytes);
  check_all_reduce(comm, slab_bytes);
  check_all_to_all(comm);
  check_broadcast(comm);
  check_send_recv(comm);
  check_split(comm);
  check_many_in_flight(comm, 40);
  check_late_ready(comm);
  check_meter(comm);
  check_hash(comm);
}

}  // namespace tranche::test
