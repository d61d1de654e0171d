// A group of one rank: its reduce_scatter rounds and adds in one pass, on every kind of device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "device/work_recorder.h"
#include "device_ranks.h"
#include "tests/core/error_text.h"
#include "tranche/core/dtype.h"
#include "tranche/device/memory_resources.h"

namespace tranche::test {
namespace {

/// Values that the dtypes round differently, including ties and special values.
std::vector<float> values_of(std::int64_t count, std::uint64_t salt) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float special[] = {0.0f,    -0.0f,      infinity,    -infinity,   std::nanf(""), 1e-42f,  -1e-30f,
                           65519.f, 3.3961e38f, 1.00390625f, 1.01171875f, -65536.f,      5.9e-8f, 2049.f};
  std::vector<float> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::uint64_t draw = (i + 1) * (2 * salt + 1) * 0x9e3779b97f4a7c15ull >> 40;
    values[i] = draw % 5 == 0 ? special[draw / 5 % std::size(special)]
                              : (static_cast<float>(draw) - 8388608.0f) * 1.1920929e-5f;
  }
  return values;
}

float rounded_to(DataType dtype, float value) {
  if (dtype == DataType::bfloat16) return to_float(from_float<bfloat16>(value));
  if (dtype == DataType::float16) return to_float(from_float<float16>(value));
  return value;
}

template <typename T>
void expect_bits(const std::vector<T>& got, const std::vector<T>& wanted, const std::string& where) {
  ASSERT_EQ(got.size(), wanted.size()) << where;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const float g = to_float(got[i]), w = to_float(wanted[i]);
    if (std::isnan(g) && std::isnan(w)) continue;
    ASSERT_EQ(std::memcmp(&got[i], &wanted[i], sizeof(T)), 0)
        << where << ", element " << i << ": " << g << " instead of " << w;
  }
}

template <typename Out>
void check_one(Communicator& comm, Device& device, std::int64_t count, DataType to, bool accumulate) {
  const std::vector<float> source = values_of(count, 3);
  std::vector<Out> before, wanted;
  for (const float value : values_of(count, 8)) before.push_back(from_float<Out>(value));
  for (std::size_t i = 0; i < source.size(); ++i) {
    const float rounded = rounded_to(to, source[i]);
    wanted.push_back(from_float<Out>(accumulate ? to_float(before[i]) + rounded : rounded));
  }
  OnDevice<float> full(device, source);
  OnDevice<Out> output(device, before);
  ReductionOptions options;
  options.accumulate = accumulate;
  options.round_to = to;
  const std::vector<Event> ready{device.compute_stream().record()};
  comm.reduce_scatter(full.data(), DataType::float32, output.data(), data_type_of<Out>(), count, options,
                      ready, label)
      .wait();
  const std::string where = "fp32 as " + std::string(name_of(to)) + " to " +
                            std::string(name_of(data_type_of<Out>())) + ", " + std::to_string(count) +
                            " elements" + (accumulate ? ", added" : "");
  expect_bits(output.read(), wanted, where);
  expect_bits(full.read(), source, where + ": the source");
  if (accumulate || data_type_of<Out>() != DataType::float32) return;
  comm.reduce_scatter(full.data(), DataType::float32, full.data(), DataType::float32, count, options, ready,
                      label)
      .wait();
  std::vector<float> in_place;
  for (const float value : source) in_place.push_back(rounded_to(to, value));
  expect_bits(full.read(), in_place, where + ", in place");
}

void check_all(Communicator& comm, Device& device) {
  ASSERT_EQ(comm.size(), 1);
  for (const std::int64_t count : {0, 1, 2, 13, 257, 4099, 65537}) {
    for (const DataType to : {DataType::float32, DataType::bfloat16, DataType::float16}) {
      EXPECT_TRUE(comm.rounds(DataType::float32, to));
      for (const bool accumulate : {false, true}) {
        check_one<float>(comm, device, count, to, accumulate);
        check_one<bfloat16>(comm, device, count, to, accumulate);
        check_one<float16>(comm, device, count, to, accumulate);
      }
    }
  }
  const TrafficCount sent = comm.meter().total(Traffic::data);
  EXPECT_GT(sent.calls, 0);
  EXPECT_EQ(sent.elements, 0);
  EXPECT_EQ(sent.bytes, 0);
}

#ifndef TRANCHE_TEST_GPU
TEST(OneRank, RoundsAndAddsInHostMemoryOnSeveralThreads) {
  for (const int threads : {1, 3}) {
    DeviceOptions cpu;
    cpu.threads = threads;
    const auto device = make_device(cpu);
    CommunicatorOptions options = host_options(60);
    options.device = device.get();
    Ledger ledger;
    TrackingResource memory(device->memory(Tier::device), ledger);
    options.memory = &memory;
    check_all(*make_self_communicator(options), *device);
    EXPECT_EQ(memory.calls(), 0) << "nothing lies in between";
  }
}

TEST(OneRank, TouchesNoMemoryOfAMetaDevice) {
  DeviceOptions meta;
  meta.kind = DeviceKind::meta;
  const auto device = make_device(meta);
  CommunicatorOptions options;
  options.device = device.get();
  const auto comm = make_self_communicator(options);
  ReductionOptions sum;
  sum.accumulate = true;
  comm->reduce_scatter(reinterpret_cast<float*>(64), DataType::float32, reinterpret_cast<float*>(4096),
                       DataType::float32, 1000, sum, {}, label)
      .wait();
  EXPECT_EQ(comm->meter().total(Traffic::data).calls, 1);
}

TEST(OneRank, RoundsAndAddsInAGroupSplitFromMore) {
  run_thread_ranks(2, [](int rank, const CommunicatorFactory& factory) {
    const auto all = factory(host_options(60));
    EXPECT_FALSE(all->rounds(DataType::float32, DataType::bfloat16));
    EXPECT_TRUE(all->rounds(DataType::bfloat16, DataType::bfloat16));
    const auto alone = all->split(rank, 0);
    const auto device = make_device({});
    check_all(*alone, *device);
  });
}

TEST(OneRank, IsPlannedAsTheKernelsThatItRuns) {
  for (const bool inline_compute : {true, false}) {
    CommunicatorOptions options;
    options.recorder = detail::WorkRecorder::make(inline_compute);
    const auto comm = make_meta_communicator(0, 1, 1, options);
    float* const nowhere = reinterpret_cast<float*>(64);
    float* const elsewhere = nowhere + 1000;
    const auto reduce = [&](const float* from, std::optional<DataType> to, bool accumulate) {
      ReductionOptions sum;
      sum.accumulate = accumulate;
      sum.round_to = to;
      comm->reduce_scatter(from, DataType::float32, nowhere, DataType::float32, 10, sum, {}, label);
      return options.recorder->work().size();
    };
    EXPECT_EQ(reduce(nowhere, DataType::float32, false), 0u) << "the sum is there already";
    ASSERT_EQ(reduce(nowhere, DataType::bfloat16, false), 1u);
    ASSERT_EQ(reduce(elsewhere, DataType::float32, true), 2u);
    const detail::RecordedWork rounding = options.recorder->work()[0], sum = options.recorder->work()[1];
    EXPECT_EQ(rounding.kind, detail::WorkKind::kernel);
    EXPECT_EQ(rounding.name, "rounded_sum");
    EXPECT_EQ(rounding.bytes_read, 40);
    EXPECT_EQ(rounding.bytes_written, 40);
    EXPECT_EQ(sum.name, "ordered_sum");
    EXPECT_EQ(sum.bytes_read, 80);
    EXPECT_EQ(rounding.lane == detail::WorkRecorder::host_lane, inline_compute);
    EXPECT_EQ(comm->meter().total(Traffic::data).bytes, 0);
  }
}

TEST(OneRank, RoundsWhatOthersHaveToCastBefore) {
  const auto message = [](Communicator& comm, DataType from, DataType to) {
    ReductionOptions options;
    options.round_to = to;
    float values[4] = {};
    return message_of<InvalidArgument>(
        [&] { comm.reduce_scatter(values, from, values, DataType::float32, 1, options, {}, label); });
  };
  const auto alone = make_self_communicator(), two = make_meta_communicator(0, 2, 2);
  EXPECT_EQ(message(*two, DataType::float32, DataType::bfloat16),
            "reduce_scatter of unit h.3 in backward: rounds fp32 to bf16 or fp16 in a group of one rank, not "
            "fp32 to bf16 in one of 2; cast the values first");
  EXPECT_THAT(message(*alone, DataType::bfloat16, DataType::float16),
              testing::HasSubstr("not bf16 to fp16 in one of 1; cast the values first"));
  EXPECT_THAT(message(*alone, DataType::float32, DataType::float64), testing::HasSubstr("not fp32 to fp64"));
}
#endif

TEST(OneRank, RoundsAndAddsInDeviceMemory) {
  for (const comm::DeviceTransport transport : transports()) {
    if (const std::string why = obstacle(transport, 1); !why.empty()) continue;
    Rank mine(transport, make_self_communicator(host_options(60)));
    check_all(*mine.comm, *mine.device);
  }
}

}  // namespace
}  // namespace tranche::test
