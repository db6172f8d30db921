#include "proto/call.h"
