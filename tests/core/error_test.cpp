#include "tranche/core/error.h"

#include <gtest/gtest.h>

#include <string>

namespace tranche {
namespace {

TEST(Error, TextHoldsMessageAndPosition) {
  const int line = __LINE__ + 1;
  const Error error("the disk is full");
  EXPECT_EQ(error.message(), "the disk is full");
  EXPECT_EQ(error.position(), "error_test.cpp:" + std::to_string(line));
  EXPECT_EQ(std::string(error.what()), "the disk is full (error_test.cpp:" + std::to_string(line) + ")");
  EXPECT_EQ(error.rank(), -1);
  EXPECT_EQ(error.exit_status(), ExitStatus::other);
}

TEST(Error, RankIsAttachedOnce) {
  Error error("m");
  error.attach_rank(-1);
  EXPECT_EQ(error.rank(), -1);
  error.attach_rank(3);
  error.attach_rank(5);
  EXPECT_EQ(error.rank(), 3);
  EXPECT_EQ(std::string(error.what()), "[rank 3] m (" + error.position() + ")");
  const Error copy = error;
  EXPECT_STREQ(copy.what(), error.what());
}

TEST(Error, RankAttachedWhileHandlingSurvivesRethrow) {
  try {
    try {
      throw OutOfMemory("no room");
    } catch (Error& error) {
      error.attach_rank(7);
      throw;
    }
  } catch (const std::exception& error) {
    EXPECT_EQ(std::string(error.what()).rfind("[rank 7] no room (error_test.cpp:", 0), 0u) << error.what();
  }
}

TEST(Error, EachTypeHasItsExitStatus) {
  EXPECT_EQ(InvalidArgument("m").exit_status(), ExitStatus::other);
  EXPECT_EQ(LogicError("m").exit_status(), ExitStatus::other);
  EXPECT_EQ(ConfigurationError("m").exit_status(), ExitStatus::configuration);
  EXPECT_EQ(OutOfMemory("m").exit_status(), ExitStatus::out_of_memory);
  EXPECT_EQ(CheckpointError("m").exit_status(), ExitStatus::checkpoint);
  EXPECT_EQ(CommunicationError("m").exit_status(), ExitStatus::communication);
  EXPECT_EQ(NumericalError("m").exit_status(), ExitStatus::numerical);
  EXPECT_EQ(static_cast<int>(ExitStatus::success), 0);
  EXPECT_EQ(static_cast<int>(ExitStatus::other), 1);
  EXPECT_EQ(static_cast<int>(ExitStatus::configuration), 2);
  EXPECT_EQ(static_cast<int>(ExitStatus::out_of_memory), 3);
  EXPECT_EQ(static_cast<int>(ExitStatus::checkpoint), 4);
  EXPECT_EQ(static_cast<int>(ExitStatus::communication), 5);
  EXPECT_EQ(static_cast<int>(ExitStatus::numerical), 6);
}

TEST(Error, AnyExceptionHasATextAndAnExitStatus) {
  CheckpointError known("damaged");
  known.attach_rank(2);
  const auto of_known = std::make_exception_ptr(known);
  EXPECT_EQ(message_of(of_known), "damaged") << "without rank and position";
  EXPECT_EQ(exit_status_of(of_known), ExitStatus::checkpoint);
  const auto of_system = std::make_exception_ptr(std::bad_alloc());
  EXPECT_EQ(message_of(of_system), std::bad_alloc().what());
  EXPECT_EQ(exit_status_of(of_system), ExitStatus::out_of_memory);
  const auto of_user = std::make_exception_ptr(std::runtime_error("index"));
  EXPECT_EQ(message_of(of_user), "index");
  EXPECT_EQ(exit_status_of(of_user), ExitStatus::other);
  EXPECT_EQ(message_of(std::make_exception_ptr(7)), "unknown error");
  EXPECT_EQ(exit_status_of(std::make_exception_ptr(7)), ExitStatus::other);
}

TEST(Error, NotCompiledNamesTheOption) {
  const NotCompiled error("Open MPI", "TRANCHE_MPI");
  EXPECT_EQ(error.message(), "Open MPI is not part of this build; configure with -DTRANCHE_MPI=ON");
  EXPECT_EQ(error.exit_status(), ExitStatus::configuration);
}

}  // namespace
}  // namespace tranche
