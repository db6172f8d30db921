/* placeholder */
typedef int placeholder;
