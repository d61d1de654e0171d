# tranche_common_headers(<target> <library|test> <level>): in a unity build with GCC, external headers that most sources of this kind
# include are compiled once for all targets with the optimisation <level> (such as -O1), instead of once in each unit. Sources still have to
# include what they use, which only the preset without unity builds checks.
function(tranche_common_headers target kind level)
  if(NOT CMAKE_UNITY_BUILD OR NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    return()
  endif()
  set(common tranche_${kind}_headers${level})
  if(NOT TARGET ${common})
    set(headers algorithm array atomic chrono cmath condition_variable cstddef cstdint cstring deque exception filesystem
                fstream functional initializer_list limits map memory mutex numeric optional ostream random set span
                sstream stdexcept string string_view thread tuple type_traits unordered_map utility variant vector
                nlohmann/json.hpp)
    if(kind STREQUAL "test")
      list(APPEND headers gmock/gmock.h gtest/gtest.h)
      set(link GTest::gmock)
    else()
      list(APPEND headers fmt/format.h)
      set(link fmt::fmt)
    endif()
    list(TRANSFORM headers PREPEND <)
    list(TRANSFORM headers APPEND >)
    file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/generated/${common}.cpp CONTENT "// Written by CMake.\n" @ONLY)
    add_library(${common} OBJECT ${PROJECT_BINARY_DIR}/generated/${common}.cpp)
    target_compile_options(${common} PRIVATE ${level})
    target_link_libraries(${common} PRIVATE nlohmann_json::nlohmann_json ${link} tranche_flags)
    if(kind STREQUAL "library")
      set_target_properties(${common} PROPERTIES POSITION_INDEPENDENT_CODE ON)
    endif()
    target_precompile_headers(${common} PRIVATE ${headers})
  endif()
  target_precompile_headers(${target} REUSE_FROM ${common})
endfunction()

# tranche_library(<folder> SOURCES ... [ALONE ...] [FAST ...] [CUDA_SOURCES ...] [CUDA_NO_FMA ...] [CUDA_LINK ...]
#                 [DEPENDS <folders of ours> ...] [PUBLIC_LINK ...] [PRIVATE_LINK ...])
# Makes the library tranche_<folder>, exported as tranche::<folder>: static, or shared with TRANCHE_SHARED. In a unity
# build sources under ALONE and FAST are units of their own: ALONE because they use a name that another source uses too,
# or include themselves; FAST because they have loops over elements, which are compiled with -O3 in folders that are not.
# CUDA_SOURCES are the sources that need CUDA's headers, and CUDA_LINK lists the libraries that they need. They are an
# object library, so that the rest of the folder is compiled by the same commands with and without CUDA.
function(tranche_library folder)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" ""
    "SOURCES;ALONE;FAST;CUDA_SOURCES;CUDA_NO_FMA;CUDA_LINK;DEPENDS;PUBLIC_LINK;PRIVATE_LINK")
  set_source_files_properties(${arg_ALONE} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  set(target tranche_${folder})
  if(TRANCHE_SHARED)
    add_library(${target} SHARED ${arg_SOURCES} ${arg_ALONE} ${arg_FAST})
  else()
    add_library(${target} STATIC ${arg_SOURCES} ${arg_ALONE} ${arg_FAST})
  endif()
  add_library(tranche::${folder} ALIAS ${target})
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_include_directories(${target} PUBLIC
    $<BUILD_INTERFACE:${tranche_include_dir}> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  tranche_compile_options(${target} ${folder})
  if(arg_FAST)
    set_source_files_properties(${arg_FAST} PROPERTIES COMPILE_OPTIONS "$<$<CONFIG:Release>:-O3>"
                                SKIP_PRECOMPILE_HEADERS ON)
  endif()
  foreach(dependency ${arg_DEPENDS})
    target_link_libraries(${target} PUBLIC tranche_${dependency})
  endforeach()
  target_link_libraries(${target} PUBLIC ${arg_PUBLIC_LINK}
                        PRIVATE ${arg_PRIVATE_LINK} $<BUILD_INTERFACE:tranche_flags>)
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${folder} POSITION_INDEPENDENT_CODE ON
                        SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
  set_property(GLOBAL APPEND PROPERTY tranche_libraries ${target})
  if(NOT arg_CUDA_SOURCES)
    return()
  endif()
  set(part ${target}_cuda)
  add_library(${part} OBJECT)
  set_target_properties(${part} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  tranche_cuda_sources(${part} ${arg_CUDA_SOURCES} NO_FMA ${arg_CUDA_NO_FMA})
  tranche_compile_options(${part} ${folder})
  target_include_directories(${part} PRIVATE ${tranche_include_dir})
  foreach(dependency ${arg_DEPENDS})
    target_link_libraries(${part} PRIVATE tranche_${dependency})
  endforeach()
  target_link_libraries(${part} PRIVATE ${arg_PUBLIC_LINK} ${arg_PRIVATE_LINK} ${arg_CUDA_LINK} tranche_flags)
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:${part}>)
  set_target_properties(${target} PROPERTIES LINKER_LANGUAGE CXX)
  # Links the library without its include directories. (target_link_libraries() would wrap LINK_ONLY twice, and an installation could not
  # name the library.)
  foreach(library ${arg_CUDA_LINK})
    set_property(TARGET ${target} APPEND PROPERTY LINK_LIBRARIES $<LINK_ONLY:${library}>)
    if(NOT TRANCHE_SHARED)
      set_property(TARGET ${target} APPEND PROPERTY INTERFACE_LINK_LIBRARIES $<LINK_ONLY:${library}>)
    endif()
  endforeach()
endfunction()

# The optimisation of a folder. In release builds folders of loops over elements (core and kernels) and sources under FAST use -O3. The
# others use -O1, which compiles in 0.6 of the time; a training step spends its time in kernels. Sanitized builds use the preset's -O1, and
# no optimisation for folders that take little run time.
function(tranche_compile_options target folder)
  if(folder MATCHES "^(comm|offload|checkpoint)$")  # they interpret memory that others wrote
    set_target_properties(${target} PROPERTIES TRANCHE_POINTER_CHECKS ON)
  endif()
  if(folder MATCHES "^(core|kernels)$" OR TRANCHE_SANITIZE MATCHES "fuzzer")
    return()
  endif()
  set(level -O1)
  if(TRANCHE_SANITIZE AND
     (folder MATCHES "^(config|engine|engine_parts|report|training|planner|tools)$" OR
      (TRANCHE_SANITIZE MATCHES "address" AND folder MATCHES "^(checkpoint|models|offload|optim|partition)$")))
    set(level -O0)
  endif()
  if(CMAKE_BUILD_TYPE STREQUAL "Release" OR TRANCHE_SANITIZE)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:${level}>)
    if(NOT target MATCHES "_cuda$")
      tranche_common_headers(${target} library ${level})
    endif()
  endif()
endfunction()

# tranche_program(<name> SOURCES ... [LINK ...]) makes the program <name>, in bin/ of the build and of the installation. The target is
# <name>_program, because tranche::<name> may be a library.
function(tranche_program name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;LINK")
  add_executable(${name}_program ${arg_SOURCES})
  target_link_libraries(${name}_program PRIVATE ${arg_LINK} tranche_flags)
  set_target_properties(${name}_program PROPERTIES OUTPUT_NAME ${name})
  if(TRANCHE_INSTALL)
    install(TARGETS ${name}_program RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  endif()
endfunction()
