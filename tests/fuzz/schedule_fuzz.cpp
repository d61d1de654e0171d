// Pipeline schedules as text, and the checker that follows the reader.

#include "pipeline/schedule/check.h"
#include "pipeline/schedule/generators.h"
#include "pipeline/schedule/lower.h"
#include "pipeline/schedule/text.h"
#include "tests/fuzz/fuzz_target.h"

namespace tranche::fuzz {

namespace {

using namespace tranche::pipeline;

void read_schedule_file(std::string_view input) {
  const PipelineSchedule schedule = read_schedule(input, "schedule.csv");
  require(read_schedule(write_schedule(schedule), "schedule.csv") == schedule,
          "a schedule changes when it is written");
  const PipelineSchedule lowered = with_messages(schedule);
  const bool stream = check(lowered, MessageModel::stream).accepted();
  const bool channels = check(lowered, MessageModel::channels).accepted();
  const bool async = check(lowered, MessageModel::async).accepted();
  require(!stream || channels, "channels wait where one stream does not");
  require(!channels || async, "messages that wait for nothing wait where channels do not");
  (void)proved(schedule, MessageModel::channels, "schedule.csv");
}

std::vector<std::string> schedule_seeds() {
  const PipelineSchedule messages = with_messages(generate("zb-v", 2, 2));
  return {write_schedule(generate("1f1b", 2, 2)), write_schedule(messages),
          write_schedule(with_gathers(messages, 1)),
          write_schedule(with_messages(generate("interleaved", 2, 2, 2))), "0F0,,0B0\r\n,1F0,1I0,1W0,\r\n"};
}

}  // namespace

Target schedule_target() {
  return {"schedule", read_schedule_file, schedule_seeds, {ExitStatus::configuration}};
}

}  // namespace tranche::fuzz
