# tranche_library(<folder> SOURCES ... [ALONE ...] [DEPENDS <folders of ours> ...] [PUBLIC_LINK ...] [PRIVATE_LINK ...])
# One static library tranche_<folder>, exported as tranche::<folder>. Sources under ALONE stay units of their own in a
# unity build (the sanitizer presets): names of theirs are another source's too, or they include themselves.
function(tranche_library folder)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;ALONE;DEPENDS;PUBLIC_LINK;PRIVATE_LINK")
  if(arg_ALONE)
    set_source_files_properties(${arg_ALONE} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    list(APPEND arg_SOURCES ${arg_ALONE})
  endif()
  set(target tranche_${folder})
  add_library(${target} STATIC ${arg_SOURCES})
  add_library(tranche::${folder} ALIAS ${target})
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_include_directories(${target} PUBLIC
    $<BUILD_INTERFACE:${tranche_include_dir}> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  if(folder MATCHES "^(comm|offload|checkpoint)$")  # memory that others filled
    set_target_properties(${target} PROPERTIES TRANCHE_POINTER_CHECKS ON)
  endif()
  # Few loops over elements here, and much that is slow to compile. ThreadSanitizer's tests would lose more than that.
  set(few_loops OFF)
  if(folder MATCHES "^(engine|engine_parts|report|generation|trainer|planner|tools)$")
    set(few_loops ON)
  endif()
  if(NOT TRANCHE_SANITIZE MATCHES "fuzzer" AND
     ((TRANCHE_SANITIZE AND few_loops) OR
      (TRANCHE_SANITIZE MATCHES "address" AND folder MATCHES "^(checkpoint|models|offload|optim|partition)$")))
    target_compile_options(${target} PRIVATE -O0)
  elseif(NOT TRANCHE_SANITIZE AND few_loops)  # compiles in 0.6 of the time that -O3 takes
    target_compile_options(${target} PRIVATE $<$<AND:$<CONFIG:Release>,$<COMPILE_LANGUAGE:CXX>>:-O1>)
  endif()
  foreach(dependency ${arg_DEPENDS})
    target_link_libraries(${target} PUBLIC tranche_${dependency})
  endforeach()
  target_link_libraries(${target} PUBLIC ${arg_PUBLIC_LINK}
                        PRIVATE ${arg_PRIVATE_LINK} $<BUILD_INTERFACE:tranche_flags>)
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${folder} POSITION_INDEPENDENT_CODE ON)
  set_property(GLOBAL APPEND PROPERTY tranche_libraries ${target})
endfunction()

# tranche_program(<name> SOURCES ... [LINK ...])
# The program <name>, in bin/ of the build and of the installation. The target is <name>_program, since tranche::<name>
# may be a library.
function(tranche_program name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;LINK")
  add_executable(${name}_program ${arg_SOURCES})
  target_link_libraries(${name}_program PRIVATE ${arg_LINK} tranche_flags)
  set_target_properties(${name}_program PROPERTIES OUTPUT_NAME ${name})
  if(TRANCHE_INSTALL)
    install(TARGETS ${name}_program RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  endif()
endfunction()
