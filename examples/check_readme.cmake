# cmake -DREADME= -DEXAMPLE= -P check_readme.cmake: README's C++ block is the example, byte for byte, so that what
# builds and runs the example does so for README.
file(READ ${README} readme)
file(READ ${EXAMPLE} example)
string(FIND "${readme}" "\n```cpp\n${example}```\n" place)
if(place EQUAL -1)
  message(FATAL_ERROR "${README} does not show ${EXAMPLE} as it is: copy it into the block that begins with ```cpp")
endif()
