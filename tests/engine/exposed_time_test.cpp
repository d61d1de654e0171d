// How long the compute stream waited, by reason, computed once the waits are complete.
#include "engine/exposed_time.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>

#include "core/clock.h"
#include "tests/core/error_text.h"
#include "tranche/device/device.h"

namespace tranche::test {
namespace {

using detail::Exposed;
using detail::ExposedTime;
using ::testing::HasSubstr;

/// An event that has not passed when it is queried; the test sets the time at which it passed.
class Awaited : public EventState {
 public:
  explicit Awaited(double at) : at_(at) {}
  bool query() override { return false; }
  bool wait(double) override { return true; }
  double passed_at() override { return at_; }

 private:
  double at_;
};

/// An event in the far future, so that the duration of the test does not matter.
Event passed_in(double seconds) {
  return Event(std::make_shared<Awaited>(detail::seconds_now() + seconds));
}
constexpr double hour = 3600;

class ExposedTimeTest : public ::testing::Test {
 protected:
  std::unique_ptr<Device> device_ = make_device({});
  ExposedTime exposed_{device_->compute_stream()};
};

TEST_F(ExposedTimeTest, IsCountedByWhatWasWaitedFor) {
  exposed_.wait_for(passed_in(100 * hour), Exposed::gather);
  exposed_.wait_for(passed_in(200 * hour), Exposed::reduce);
  exposed_.wait_for(passed_in(300 * hour), Exposed::gather);
  EXPECT_EQ(exposed_.take(Exposed::gather), 0) << "not settled";
  exposed_.settle();
  EXPECT_NEAR(exposed_.take(Exposed::gather), 400 * hour, hour);
  EXPECT_EQ(exposed_.take(Exposed::gather), 0) << "taken";
  EXPECT_NEAR(exposed_.take(Exposed::reduce), 200 * hour, hour);
  EXPECT_EQ(exposed_.take(Exposed::offload), 0);
  exposed_.settle();
  EXPECT_EQ(exposed_.take(Exposed::reduce), 0) << "settled once";
}

TEST_F(ExposedTimeTest, IsNothingWhereNobodyWaitedOrNobodyKnows) {
  exposed_.wait_for(Event(), Exposed::gather);
  const auto done = std::make_shared<HostEvent>();
  done->complete();
  exposed_.wait_for(Event(done), Exposed::gather);
  exposed_.wait_for(passed_in(-hour), Exposed::gather);
  exposed_.wait_for(Event(std::make_shared<Awaited>(std::numeric_limits<double>::quiet_NaN())),
                    Exposed::gather);
  exposed_.settle();
  EXPECT_EQ(exposed_.take(Exposed::gather), 0);
}

TEST_F(ExposedTimeTest, CanBeForgotten) {
  exposed_.wait_for(passed_in(hour), Exposed::gather);
  exposed_.settle();
  exposed_.wait_for(passed_in(hour), Exposed::offload);
  exposed_.clear();
  exposed_.settle();
  EXPECT_EQ(exposed_.take(Exposed::gather), 0);
  EXPECT_EQ(exposed_.take(Exposed::offload), 0);
}

TEST_F(ExposedTimeTest, AFailureIsToldWhereItIsWaitedFor) {
  const auto failed = std::make_shared<HostEvent>();
  failed->fail(std::make_exception_ptr(IoError("disk 3 is gone", 5)));
  EXPECT_THAT(message_of<IoError>([&] { exposed_.wait_for(Event(failed), Exposed::offload); }),
              HasSubstr("disk 3 is gone"));
}

}  // namespace
}  // namespace tranche::test
