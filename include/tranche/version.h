#pragma once

namespace tranche {

/// Version of the library and program; CMake reads it from here.
inline constexpr const char* version = "0.1.0";

}  // namespace tranche
